"""A bound that is one differentiable number."""

from abc import abstractmethod
from typing import Any

import torch
from pyro.infer import ELBO
from pyro.infer.util import torch_item
from pyro.util import warn_if_nan
from torch import Tensor


class DifferentiableELBO(ELBO):
    """Base of bounds whose gradient is that of one number.

    You implement ``differentiable_loss``.  You get ``loss`` and ``loss_and_grads``, for ``SVI`` and ``loss(model, guide)``.
    """

    @abstractmethod
    def differentiable_loss(self, model: Any, guide: Any, *args, **kwargs) -> Tensor:
        """Minus an estimate of the bound, to differentiate."""

    def loss(self, model: Any, guide: Any, *args, **kwargs) -> float:
        """Minus an estimate of the bound, without gradients."""
        with torch.no_grad():
            return torch_item(self.differentiable_loss(model, guide, *args, **kwargs))

    def loss_and_grads(self, model: Any, guide: Any, *args, **kwargs) -> float:
        """Minus an estimate of the bound; its gradients are added to the parameters'."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            loss.backward(retain_graph=self.retain_graph)
        value = torch_item(loss)
        warn_if_nan(value, "loss")
        return value
