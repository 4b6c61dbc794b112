"""Stop a fit when it predicts no better what it was not shown, and go back to where it predicted best."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_lvgp._utils.distributed import Processes
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes


@dataclass(frozen=True)
class EarlyStopping:
    """A score to watch during :func:`~pyro_lvgp.infer.fit`, whose lowest value marks the state to keep.

    A bound goes on rising where a decoder learns the data by heart.  The score of entries held out turns then.

    :param score: what to keep low, such as the negative log density of entries that the fit is not shown.  Its draws are the
        same at every call, and leave those of the fit alone.
    :param every: steps between two calls; the state after the last step is scored too.
    :param patience: calls without a new lowest score, after which to stop; None to go through all steps.
    :raises ValueError: if ``every`` or ``patience`` is below 1.

    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> from pyro_lvgp.infer import fit
    >>> Y = torch.randn(20, 3)
    >>> held_out = torch.rand(20, 3) < 0.1
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5).initialize(Y)
    >>> guide, seen = MeanFieldGuide(model), Y.masked_fill(held_out, torch.nan)
    >>> def error():
    ...     return (model.reconstruct(guide, seen).mean - Y)[held_out].square().mean().item()
    >>> history = fit(model, guide, seen, num_steps=6, early_stopping=EarlyStopping(error, every=2), progress=False)
    >>> [step for step, _ in history.scores]
    [2, 4, 6]

    Source: Prechelt (1998), "Early stopping – but when?".
    """

    score: Callable[[], float]
    every: int = 100
    patience: int | None = None

    def __post_init__(self) -> None:
        check_sizes(every=self.every)
        if self.patience is not None:
            check_sizes(patience=self.patience)


@dataclass
class Watch:
    """One fit under a rule to stop early.

    :param rule: the rule; None to watch nothing.
    :param modules: model and guide; what of them is no module has its parameters in Pyro's store.
    :param processes: those that fit together, whose mean score counts.
    :param scores: numbers of steps taken and scores.
    """

    rule: EarlyStopping | None
    modules: tuple[Any, ...]
    processes: Processes
    scores: list[tuple[int, float]] = field(default_factory=list)
    _best: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def look(self, num_steps: int, *, is_last: bool = False) -> None:
        """Score the present state if it is time to, and keep a copy of it if no other was better.

        :param num_steps: number of steps taken.
        :param is_last: whether no other is to come.
        :raises ValueError: if the score is NaN.
        """
        if self.rule is None or (num_steps % self.rule.every and not is_last):
            return
        with seeded(0):
            score = self.processes.mean(float(self.rule.score()))
        if math.isnan(score):
            raise ValueError(
                f"expected a score to keep low, got NaN after {num_steps} steps; does it look at missing entries?"
            )
        self.scores.append((num_steps, score))
        if self._calls_since_best == 0:
            self._best = [(tensor, tensor.detach().clone()) for tensor in self.state()]

    @property
    def has_ended(self) -> bool:
        """Whether as many calls brought no new lowest score as there is patience for."""
        patience = None if self.rule is None else self.rule.patience
        return patience is not None and self._calls_since_best >= patience

    @property
    def _calls_since_best(self) -> int:
        best = min(range(len(self.scores)), key=lambda i: self.scores[i][1], default=-1)
        return len(self.scores) - 1 - best

    def restore(self) -> None:
        """Go back to the best state, if there was one."""
        with torch.no_grad():
            for tensor, value in self._best:
                tensor.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Scores, and the best state."""
        return {"scores": self.scores, "best": [value for _, value in self._best]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; without a rule there is none to go back to.

        :param state: what :meth:`state_dict` returned.
        """
        if self.rule is None:
            return
        self.scores[:] = state["scores"]
        self._best = list(zip(self.state(), state["best"], strict=True)) if state["best"] else []

    def state(self) -> Iterator[Tensor]:
        """All parameters and buffers, each once."""
        of_modules = (
            tensor
            for module in self.modules
            if isinstance(module, nn.Module)
            for tensor in (*module.parameters(), *module.buffers())
        )
        stored = (tensor for _, tensor in pyro.get_param_store().named_parameters())
        yield from {id(tensor): tensor for tensor in (*of_modules, *stored)}.values()
