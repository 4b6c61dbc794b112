"""Base class of bounds with a differentiable estimate."""

from abc import abstractmethod
from functools import cached_property
from typing import Any

import torch
from pyro.infer import ELBO
from pyro.infer.enum import get_importance_trace
from pyro.infer.util import torch_item
from pyro.poutine import Trace
from pyro.util import warn_if_nan
from torch import Tensor

from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp.infer.elbo._limits import BoundLimit

__all__ = ["DifferentiableELBO"]


class DifferentiableELBO(ELBO):
    r"""Base class of bounds whose gradients are those of a single differentiable estimate.

    Subclasses implement :meth:`differentiable_loss`, from which this class computes :meth:`loss` and :meth:`loss_and_grads`.
    Both raise a ``ValueError`` for a bound above the largest log likelihood that the data can have: 0 for counts, and
    :math:`-\tfrac12 \log 2\pi\sigma^2` for each entry under Gaussian noise.

    >>> from pyro import poutine
    >>> class OneSample(DifferentiableELBO):
    ...     def differentiable_loss(self, model, guide, *args, **kwargs):
    ...         q = poutine.trace(guide).get_trace(*args, **kwargs)
    ...         return q.log_prob_sum() - poutine.trace(poutine.replay(model, q)).get_trace(*args, **kwargs).log_prob_sum()
    >>> OneSample().loss(lambda: None, lambda: None)
    0.0
    """

    @property
    def is_bound(self) -> bool:
        """Whether :meth:`differentiable_loss` is minus a bound on the evidence, and no other objective."""
        return True

    @abstractmethod
    def differentiable_loss(self, model: Any, guide: Any, *args, **kwargs) -> Tensor:
        """Compute minus an estimate of the bound, to differentiate.

        :param model: a Pyro model.
        :param guide: its guide.
        :param args: arguments of both.
        :returns: a scalar.
        """

    @cached_property
    def _limit(self) -> BoundLimit:
        return BoundLimit()

    def _get_trace(self, model: Any, guide: Any, args: tuple, kwargs: dict) -> tuple[Trace, Trace]:
        """Trace the guide and then the model at its draws; abstract in Pyro's base class."""
        return get_importance_trace("flat", self.max_plate_nesting, model, guide, args, kwargs)

    @pyro_lock
    def loss(self, model: Any, guide: Any, *args, **kwargs) -> float:
        """Compute minus an estimate of the bound, without gradients."""
        with torch.no_grad():
            loss = torch_item(self.differentiable_loss(model, guide, *args, **kwargs))
        self._limit.check(loss, model, guide, args, kwargs)
        return loss

    @pyro_lock
    def loss_and_grads(self, model: Any, guide: Any, *args, **kwargs) -> float:
        """Compute minus an estimate of the bound, and add its gradients to those of the parameters."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            loss.backward(retain_graph=self.retain_graph)
        value = torch_item(loss)
        warn_if_nan(value, "loss")
        if self.is_bound:
            self._limit.check(value, model, guide, args, kwargs)
        return value
