"""Gradients of the rows of a mini-batch alone, for parameters with one row for each datum."""

import weakref
from typing import Any

import pyro
import torch
from jaxtyping import Float, Int
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributions import transform_to

__all__ = ["SparseRows"]


class SparseRows(Messenger):
    """Effect handler that reads only the rows of a mini-batch from parameters of a subsampled plate.

    Pyro reads all rows of ``pyro.param(..., event_dim=...)`` in a plate, transforms them to the constrained space, and selects
    those of the subsample, so that a step takes time in proportion to the rows of the data.  Under this handler the rows are
    selected first, and the gradient of the parameter is a sparse tensor of these rows.  Optimise it by
    :class:`~pyro_lvgp.infer.RowAdam` or ``torch.optim.SparseAdam``.

    The handler has no effect on a parameter whose rows are not its first dimension, at the first use, and under
    ``module_local_params``.

    :func:`~pyro_lvgp.infer.fit` uses it with :class:`~pyro_lvgp.infer.LazyAdam`.  Elsewhere it is a context:

    >>> from pyro.infer import SVI, TraceMeanField_ELBO
    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.infer import LazyAdam
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> Y, idx = torch.randn(100, 3), torch.arange(10)
    >>> model = BayesianGPLVM(100, 3, latent_dim=2, num_inducing=5).initialize(Y)
    >>> guide = MeanFieldGuide(model)
    >>> svi = SVI(model, guide, LazyAdam(), TraceMeanField_ELBO())
    >>> for _ in range(2):
    ...     with SparseRows():
    ...         loss = svi.step(Y[idx], idx)
    """

    def __enter__(self) -> "SparseRows":
        self._subsamples: dict[str, Int[Tensor, " B"]] = {}
        return super().__enter__()

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            self._subsamples[msg["name"]] = msg["value"]

    def _pyro_param(self, msg: Any) -> None:
        event_dim, store = msg["kwargs"].get("event_dim"), pyro.get_param_store()
        tensor = store._params.get(msg["name"])  # get_state() would remove the attribute unconstrained of all parameters
        if event_dim is None or tensor is None:
            return
        frames = [f for f in msg["cond_indep_stack"] if f.full_size not in (None, f.size) and f.name in self._subsamples]
        if len(frames) != 1 or tensor.dim() != event_dim - frames[0].dim or len(tensor) != frames[0].full_size:
            return
        rows = _SelectRows.apply(tensor, self._subsamples[frames[0].name].to(tensor.device))
        value = transform_to(store._constraints[msg["name"]])(rows)
        value.unconstrained = weakref.ref(tensor)
        msg["value"] = value
        msg["kwargs"]["event_dim"] = None  # otherwise the plate would select rows again


class _SelectRows(Function):
    """Select rows of a tensor; the gradient of the tensor is sparse."""

    @staticmethod
    def forward(ctx: Any, tensor: Float[Tensor, "N *shape"], index: Int[Tensor, " B"]) -> Float[Tensor, "B *shape"]:
        ctx.save_for_backward(index)
        ctx.shape = tensor.shape
        return tensor.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Float[Tensor, "B *shape"]) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return torch.sparse_coo_tensor(index[None], gradient, ctx.shape, check_invariants=False), None
