"""Pyro's SVI with a check of the loss and a record of the parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from pyro import poutine
from pyro.infer import ELBO, SVI
from pyro.infer.util import zero_grads
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_lvgp._utils.validation import check_bound
from pyro_lvgp.infer._masked_latents import RefuseMaskedLatents
from pyro_lvgp.infer._parameters import unconstrained
from pyro_lvgp.infer.elbo._limits import BoundLimit, is_of_pyro, needs_check
from pyro_lvgp.infer.optim import LazyAdam
from pyro_lvgp.infer.sparse_rows import SparseRows

__all__ = ["CheckedSVI"]


class CheckedSVI(SVI):
    """``SVI`` that raises if the loss is not finite, before the optimiser changes a parameter.

    ``parameters`` has the unconstrained tensors used so far, by their names in Pyro's param store.  ``reduce_gradients``, if
    set, is called with the parameters of a step between the backward pass and the optimiser.  It may change gradients, and
    returns the parameters to optimise.

    :param model: a Pyro model.
    :param guide: a Pyro guide.
    :param optim: a Pyro optimiser.
    :param loss: a bound.

    >>> import pyro, torch
    >>> from pyro.infer import Trace_ELBO
    >>> def model():
    ...     pyro.factor("loss", -pyro.param("p", torch.tensor(1.0)).square())
    >>> svi = CheckedSVI(model, lambda: None, pyro.optim.SGD({"lr": 0.1}), Trace_ELBO())
    >>> svi.step()
    1.0
    >>> list(svi.parameters)
    ['p']
    """

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any], optim: PyroOptim, loss: ELBO):
        super().__init__(model, guide, optim, loss)
        self.bound, self._limit = loss, BoundLimit()
        self.parameters: dict[str, Tensor] = {}
        self._has_run = False
        self.reduce_gradients: Callable[[list[Tensor]], list[Tensor]] | None = None

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Take a gradient step, and return the loss before it.

        :param args: arguments of model and guide.
        :raises ValueError: if the loss is NaN or infinite, the bound is above the largest log likelihood of the data, or model
            and guide mask a latent site differently under a bound of Pyro's.
        """
        rows = SparseRows() if isinstance(self.optim, LazyAdam) else nullcontext()
        with self._recorded() as used, self._refusing_masks(), rows:
            loss = float(self.loss_and_grads(self.model, self.guide, *args, **kwargs))
        check_bound(loss)
        if needs_check(self.bound, self.model):
            self._limit.check(loss, self.model, self.guide, args, kwargs)
        params = list(dict.fromkeys(used.values()))  # without duplicates, in the order of use
        optimized = params if self.reduce_gradients is None else self.reduce_gradients(params)
        self.optim(optimized)
        zero_grads({*params, *optimized})
        return loss

    def evaluate_loss(self, *args: Any, **kwargs: Any) -> float:
        """Evaluate the loss without gradients.

        :param args: arguments of model and guide.
        """
        with self._recorded(), self._refusing_masks():
            loss = super().evaluate_loss(*args, **kwargs)
        if needs_check(self.bound, self.model):
            self._limit.check(loss, self.model, self.guide, args, kwargs)
        return loss

    def _refusing_masks(self) -> Any:
        """Context of an evaluation of the loss, which at the first under a bound of Pyro's refuses masks of one part alone."""
        if self._has_run or not is_of_pyro(self.bound):
            return nullcontext()
        self._has_run = True
        return RefuseMaskedLatents()

    @contextmanager
    def _recorded(self) -> Iterator[dict[str, Tensor]]:
        used: dict[str, Tensor] = {}
        with poutine.trace(param_only=True) as capture:
            try:
                yield used
            finally:
                used |= {name: unconstrained(site) for name, site in capture.trace.nodes.items()}
                self.parameters |= used
