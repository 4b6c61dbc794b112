"""Fits of one model from several seeds."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.infer._fit import fit
from pyro_lvgp.infer._fit_result import FitResult
from pyro_lvgp.infer._fit_state import FitState
from pyro_lvgp.infer.callbacks import Callback

__all__ = ["Restart", "Restarts", "fit_restarts"]

_LOG = logging.getLogger("pyro_lvgp")


class Restart(NamedTuple):
    """One of several fits.

    :param model: the model.
    :param guide: its guide.
    :param history: history of the fit.
    :param seed: seed of the restart.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    history: FitResult
    seed: int

    @property
    def bound(self) -> float:
        """Mean of the bound over the last tenth of the steps, in nats for all data; −∞ without steps."""
        losses = self.history.losses
        return -float(np.mean(losses[-max(len(losses) // 10, 1) :])) if losses else -np.inf


@dataclass(frozen=True)
class Restarts:
    """Fits of one model from several seeds, ordered by their bounds, best first.

    :param fits: the fits.

    >>> low, high = (Restart(print, print, FitResult(10, losses=[loss]), seed) for seed, loss in enumerate([3.0, 2.0]))
    >>> restarts = Restarts([low, high])
    >>> restarts.best.seed, restarts.bounds
    (1, array([-2., -3.]))
    >>> print(restarts)
    2 restarts
      seed 1: bound -2.00
      seed 0: bound -3.00
    """

    fits: Sequence[Restart] = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fits", sorted(self.fits, key=lambda restart: restart.bound, reverse=True))

    @property
    def best(self) -> Restart:
        """The fit with the highest bound."""
        return self.fits[0]

    @property
    def bounds(self) -> np.ndarray:
        """Bounds of all fits, in nats for all data."""
        return np.array([restart.bound for restart in self.fits])

    def __len__(self) -> int:
        return len(self.fits)

    def __iter__(self) -> Iterator[Restart]:
        return iter(self.fits)

    def __str__(self) -> str:
        lines = [f"  seed {restart.seed}: bound {restart.bound:.2f}" for restart in self.fits]
        return "\n".join([f"{len(self.fits)} restarts", *lines])


@names_types
@pyro_lock
def fit_restarts(
    make: Callable[[int], tuple[Any, ...]],
    *args: Tensor,
    num_restarts: int = 4,
    seed: int = 0,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Restarts:
    """Fit a model several times, each time from another seed and with parameters of its own.

    Bounds have several optima.  The restart with the highest bound is :attr:`Restarts.best`, and
    :func:`~pyro_lvgp.diagnostics.chains_to_arviz` exports all restarts as chains, whose differences show how far results
    depend on the start.  The bounds of two restarts can be compared if their models are the same but for values of
    parameters.

    :param make: function of a seed that creates a model and a guide, and returns them, or both with a dictionary of further
        arguments of :func:`fit`, such as ``{"optim": guide.blocks()}``.  The global random state has the seed during the call,
        so that networks have other initial values.  Give the seed to what has a seed of its own, such as
        ``model.initialize(Y, seed=seed)``, or give ``initialize`` random latents.
    :param args: data, as for :func:`fit`.
    :param num_restarts: number of restarts.
    :param seed: seed of the first restart; that of the next is greater by one, and so on.
    :param callbacks: callbacks of each fit, whose ``on_start`` is called anew.
    :param options: further arguments of :func:`fit`; ``loss`` and ``optim`` are copied for each restart.
    :returns: the fits, best first.  After Ctrl-C no further restart begins.
    :raises ValueError: if ``num_restarts`` is not positive, or two restarts share a parameter.
    :raises TypeError: if ``make`` returns something else, or ``optim`` has blocks, which belong to one guide.

    >>> import torch
    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> Y = torch.randn(20, 3)
    >>> def make(seed):
    ...     model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5).initialize(Y, latents=torch.randn(20, 2))
    ...     return model, MeanFieldGuide(model)
    >>> restarts = fit_restarts(make, Y, num_restarts=2, num_steps=5, progress=False)
    >>> len(restarts), restarts.best is restarts.fits[0]
    (2, True)
    """
    check_sizes(num_restarts=num_restarts)
    if isinstance(options.get("optim"), Sequence):
        raise TypeError(
            "expected an optimiser of Pyro as optim, got a list of blocks, which belong to one guide; let make return (model, "
            'guide, {"optim": blocks})'
        )
    fits, owned = [], _OwnParameters()
    for number in range(num_restarts):
        with seeded(seed + number):
            made = make(seed + number)
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not all(map(callable, made[:2])):
            raise TypeError(f"expected make to return (model, guide) or (model, guide, arguments of fit), got {made!r}")
        model, guide, *more = made
        copied: dict[str, Any] = {name: copy.deepcopy(options[name]) for name in ("loss", "optim") if name in options}
        arguments: dict[str, Any] = {"callbacks": callbacks, **options, **copied, **dict(*more), "seed": seed + number}
        arguments["callbacks"] = [*arguments["callbacks"], owned]
        history = fit(model, guide, *args, **arguments)
        fits.append(Restart(model, guide, history, seed + number))
        _LOG.info("restart %d of %d, seed %d: bound %.2f", number + 1, num_restarts, seed + number, fits[-1].bound)
        if history.interrupted:
            break
    return Restarts(fits)


class _OwnParameters(Callback):
    """Check that no parameter of a fit is that of an earlier fit."""

    order = -1

    def __init__(self) -> None:
        self._of_earlier_fits: set[Tensor] = set()

    def on_start(self, state: FitState) -> None:
        """Start with the parameters of earlier fits alone.

        :param state: the fit.
        """
        self._own: set[Tensor] = set()

    def on_step(self, state: FitState) -> None:
        """Raise after the first step if a parameter is shared.

        :param state: the fit.
        """
        if self._own:
            return
        parameters = state.parameters()
        if shared := sorted(name for name, tensor in parameters.items() if tensor in self._of_earlier_fits):
            raise ValueError(
                f"expected parameters of its own for each restart, got {shared} of an earlier one; create model and guide in "
                "make(seed), and, for guides of Pyro, whose names in the param store are equal, call "
                "pyro.settings.set(module_local_params=True)"
            )
        self._own = set(parameters.values())

    def on_end(self, state: FitState) -> None:
        """Add the parameters to those of earlier fits.

        :param state: the fit.
        """
        self._of_earlier_fits |= self._own
