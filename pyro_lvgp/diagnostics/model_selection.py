"""Model selection and stacking by the predictive density of held-out entries.

The order of models by their bounds may differ from the order by predictive density.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import pyro
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.validation import check_tensors

__all__ = ["Predictive", "gap_folds", "held_out_log_prob", "held_out_nll", "shifted_folds", "stacking_weights"]

_Name = TypeVar("_Name", bound=Hashable)


@runtime_checkable
class Predictive(Protocol):
    """Predictive distribution of entries: a :class:`~pyro_lvgp.models.Prediction`, or a distribution such as ``Normal``."""

    def log_prob(self, y: Tensor, /) -> Tensor:
        """Compute the log density, entry by entry."""
        ...


@names_types
def gap_folds(
    y: Float[Tensor, "..."], num_folds: int = 3, *, consecutive: bool = False, seed: int = 0
) -> Bool[Tensor, "folds N D"]:
    """Make folds of entries to hold out, with gaps like those of the data.

    Rows with observed entries in columns that have gaps are distributed among the folds.  In each of its rows a fold hides the
    entries that are missing in another row, drawn at random, except for the first entry if no entry would remain.  With
    ``consecutive`` it hides all columns that have gaps.  Rows without observed entries count as padding: their gaps are used
    only if there are no others.

    :param y: data [N, D], NaN where missing.
    :param num_folds: number of folds.
    :param consecutive: for gaps that are blocks of time: distribute runs of rows without a gap instead of random rows.
    :param seed: seed of the random rows and of their gaps.
    :raises ValueError: if the data are no matrix, have no gap, or fewer rows to distribute than folds.
    :raises TypeError: if the data are no tensor.

    >>> y = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, torch.nan]])
    >>> gap_folds(y, 2, consecutive=True).long()
    tensor([[[0, 1],
             [0, 0],
             [0, 0]],
    <BLANKLINE>
            [[0, 0],
             [0, 1],
             [0, 0]]])
    """
    check_tensors([y])
    if y.dim() != 2:
        raise ValueError(f"expected data [rows, columns], got {list(y.shape)}; make folds of each series, and stack them")
    missing = torch.isnan(y)
    gaps_of_observed_rows = missing & ~missing.all(1, keepdim=True)
    gaps = gaps_of_observed_rows if gaps_of_observed_rows.any() else missing
    columns = gaps.any(0)
    rows = (~missing.any(1) if consecutive else (columns & ~missing).any(1)).nonzero().squeeze(1)
    if not missing.any():
        raise ValueError("expected data with gaps to imitate, got complete data; hide entries of your choice as folds")
    if not 1 <= num_folds <= len(rows):
        raise ValueError(f"expected from 1 to {len(rows)} folds, the number of rows to distribute, got {num_folds}")
    hidden = columns.expand(len(rows), -1)
    if not consecutive:
        generator = torch.Generator().manual_seed(seed)
        rows = rows[torch.randperm(len(rows), generator=generator, device="cpu").to(y.device)]
        patterns = gaps[gaps.any(1)]
        hidden = patterns[torch.randint(len(patterns), (len(rows),), generator=generator, device="cpu").to(y.device)]
    folds = torch.zeros(num_folds, *y.shape, dtype=torch.bool, device=y.device)
    for fold, fold_rows, gap in zip(folds, rows.tensor_split(num_folds), hidden.tensor_split(num_folds), strict=True):
        fold[fold_rows] = gap & ~missing[fold_rows]
    if not consecutive and gaps_of_observed_rows.any():  # keep one entry of rows that would have none
        emptied, first_observed = (folds | missing).all(-1, keepdim=True), ~missing & ((~missing).cumsum(-1) == 1)
        folds &= ~(emptied & first_observed)
    return folds


@names_types
def shifted_folds(y: Float[Tensor, "..."], num_folds: int = 3) -> Bool[Tensor, "folds N D"]:
    """Make folds of entries to hold out, each of which has all gaps of the data at another place along the rows.

    Fold k = 1 … K shifts the gaps by k N / (K + 1) rows, cyclically, so that blocks of time remain blocks.  For data without
    gaps, a fold hides a tenth of the rows, in one block.  A fold hides nothing of an output of which no entry would remain.

    :param y: data, NaN where missing.
    :param num_folds: number of folds K.
    :raises ValueError: if the data are no matrix, have fewer rows than K + 1, or entries can only be hidden with all others of
        their output.
    :raises TypeError: if the data are no tensor.

    >>> y = torch.ones(6, 2)
    >>> y[4:, 0] = torch.nan
    >>> shifted_folds(y, 2)[:, :, 0].long()
    tensor([[1, 1, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0]])
    """
    check_tensors([y])
    if y.dim() != 2 or not 1 <= num_folds < len(y):
        raise ValueError(f"expected data [rows, columns] with more rows than folds, got {list(y.shape)} and {num_folds} folds")
    missing = torch.isnan(y)
    gaps = missing
    if not missing.any():
        gaps = missing.clone()
        gaps[: -(-len(y) // 10)] = True
    shifts = [len(y) * fold // (num_folds + 1) for fold in range(1, num_folds + 1)]
    folds = torch.stack([gaps.roll(shift, 0) & ~missing for shift in shifts])
    emptied = (folds | missing).all(1, keepdim=True)
    if emptied.any() and not (folds & ~emptied).any():
        raise ValueError(
            "expected entries that remain of each output, got folds that hide all of outputs "
            f"{emptied.any(0).flatten().nonzero().flatten().tolist()}; take another number of folds, or use gap_folds"
        )
    return folds & ~emptied


@names_types
def held_out_nll(
    candidates: Mapping[str, Callable[[Tensor], Predictive]],
    y: Float[Tensor, "*shape"],
    folds: Iterable[Bool[Tensor, "..."]],
    *,
    progress: bool = True,
) -> dict[str, float]:
    """Compute the mean negative log density of hidden entries for each candidate, from the best to the worst.

    It is minus the mean of :func:`held_out_log_prob`.  To select a model, fit the first candidate to all data.

    :param candidates: functions by name, each of which fits a new model to data with additional NaN, and returns the
        prediction of all entries.
    :param y: data, NaN where missing.
    :param folds: masks of the entries to hide, each of the shape of the data, such as those of :func:`gap_folds`.
    :param progress: show a progress bar.
    :returns: nats per entry by name.
    :raises ValueError: as :func:`held_out_log_prob`.
    :raises TypeError: as :func:`held_out_log_prob`.

    >>> from torch.distributions import Normal
    >>> y = torch.tensor([[0.0, 1.0], [0.1, 1.1], [0.2, torch.nan]])
    >>> def columns(y):
    ...     return Normal(y.nanmean(0), 0.1)
    >>> def everything(y):
    ...     return Normal(y.nanmean(), 0.5)
    >>> list(held_out_nll({"everything": everything, "columns": columns}, y, gap_folds(y, 2), progress=False))
    ['columns', 'everything']
    """
    log_prob = held_out_log_prob(candidates, y, folds, progress=progress)
    return dict(sorted(((name, -values.mean().item()) for name, values in log_prob.items()), key=lambda item: item[1]))


@names_types
def held_out_log_prob(
    candidates: Mapping[str, Callable[[Tensor], Predictive]],
    y: Float[Tensor, "*shape"],
    folds: Iterable[Bool[Tensor, "..."]],
    *,
    progress: bool = True,
) -> dict[str, Float[Tensor, " hidden"]]:
    r"""Compute log densities of hidden entries for each candidate.

    .. math::

        \log p(y_{nd} \mid y_{O \setminus H_k}), \quad (n, d) \in H_k

    with the entries :math:`H_k` of fold k and all observed ones O.  Each fit has a Pyro parameter store of its own.

    :param candidates: functions by name, each of which fits a new model to data with additional NaN, and returns the
        prediction of all entries.
    :param y: data, NaN where missing.
    :param folds: masks of the entries to hide, each of the shape of the data, such as those of :func:`gap_folds`.
    :param progress: show a progress bar.
    :returns: nats of each hidden entry by name, fold after fold.
    :raises ValueError: if a fold has another shape than the data, no fold hides an observed entry, or the log density of a
        candidate is NaN or has another shape.
    :raises TypeError: if data or folds are no tensors, the data have an integer dtype, the folds are not Boolean, or the
        prediction of a candidate has no ``log_prob``.

    >>> from torch.distributions import Normal
    >>> y = torch.tensor([[0.0, 1.0], [0.1, 1.1], [0.2, torch.nan]])
    >>> held_out_log_prob({"columns": lambda y: Normal(y.nanmean(0), 0.1)}, y, gap_folds(y, 2), progress=False)
    {'columns': tensor([0.8836, 0.8836])}

    A model, whatever its likelihood:

    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.infer import fit
    >>> from pyro_lvgp.likelihoods import Poisson
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> counts = torch.poisson(torch.ones(20, 3))
    >>> counts[0, 0] = torch.nan
    >>> def gplvm(y):
    ...     model = BayesianGPLVM(20, 3, latent_dim=1, num_inducing=5, likelihood=Poisson()).initialize(y)
    ...     guide = MeanFieldGuide(model)
    ...     fit(model, guide, y, num_steps=3, progress=False)
    ...     return model.reconstruct(guide, y)
    >>> held_out_log_prob({"GPLVM": gplvm}, counts, gap_folds(counts, 2), progress=False)["GPLVM"].shape
    torch.Size([19])
    """
    folds = list(folds)
    _check_folds(y, folds)
    missing = torch.isnan(y)
    hidden = [fold & ~missing for fold in folds]
    if not any(fold.any() for fold in hidden):
        raise ValueError("expected folds that hide observed entries, got none")
    filled = _filled_in_support(y)
    found = {}
    with tqdm(total=len(candidates) * len(hidden), disable=not progress, unit="fit") as bar:
        for name, predict in candidates.items():
            bar.set_description(name)
            of_folds = []
            for fold in hidden:
                with pyro.get_param_store().scope():  # so that no fit starts from the parameters of another
                    of_folds.append(_entries_log_prob(name, predict(y.masked_fill(fold, torch.nan)), filled)[fold])
                bar.update()
            found[name] = torch.cat(of_folds)
            if found[name].isnan().any():
                raise ValueError(
                    f"expected log densities from candidate {name!r}, got NaN; does it predict the hidden entries?"
                )
    return found


def _check_folds(y: Tensor, folds: Sequence[Tensor]) -> None:
    """Raise unless the data have a floating-point dtype, and the folds are masks of their shape."""
    check_tensors([y, *folds])
    if not y.is_floating_point():
        raise TypeError(
            f"expected data of a floating-point dtype, in which NaN marks hidden entries, got {y.dtype}; use "
            "y.to(torch.get_default_dtype())"
        )
    for fold in folds:
        if fold.dtype != torch.bool:
            raise TypeError(f"expected folds of booleans, True where an entry is hidden, got {fold.dtype}; use fold.bool()")
        if fold.shape != y.shape:
            raise ValueError(f"expected folds of the data's shape {list(y.shape)}, got {list(fold.shape)}; see gap_folds")


def _entries_log_prob(name: str, prediction: object, y: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Compute the log density of each entry in the prediction of a candidate."""
    if not isinstance(prediction, Predictive):
        raise TypeError(
            f"expected a prediction with log_prob from candidate {name!r}, got {type(prediction).__name__}; return "
            "the Prediction of model.predict(...), reconstruct(...) or impute(...), or a distribution of the entries"
        )
    log_prob = prediction.log_prob(y)
    if log_prob.shape != y.shape:
        raise ValueError(
            f"expected log densities of shape {list(y.shape)} from candidate {name!r}, one for each entry, got "
            f"{list(log_prob.shape)}; does its distribution take entries as one event?"
        )
    return log_prob


def _filled_in_support(y: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Fill missing entries by the least value of their column, which is in the support of the column."""
    missing = torch.isnan(y)
    columns = y.reshape(-1, y.shape[-1]) if y.dim() else y.reshape(1, 1)
    least = columns.masked_fill(columns.isnan(), torch.inf).amin(0)
    return torch.where(missing, torch.where(least.isinf(), y[~missing].min(), least), y)


@names_types
def stacking_weights(
    log_prob: Mapping[_Name, Float[Tensor, " _"]],
    *,
    weight: Float[Tensor, " _"] | None = None,
    num_independent: float = math.inf,
    tolerance: float = 1e-6,
    max_steps: int = 10_000,
) -> dict[_Name, float]:
    r"""Compute stacking weights: those of the mixture of candidates with the highest density of hidden entries.

    .. math::

        \max_w \frac{1}{H} \sum_{h=1}^H \log \sum_{k=1}^K w_k p_k(y_h) + \frac{1}{n K} \sum_{k=1}^K \log w_k, \quad
        w_k \ge 0, \; \sum_k w_k = 1

    The second term is the Dirichlet prior of concentrations 1 + 1 / K for entries that are worth n independent ones; it is
    zero by default.  The problem is concave, and solved by expectation-maximisation,
    :math:`w_k \leftarrow \big(\frac{n}{H} \sum_h w_k p_k(y_h) / p_w(y_h) + \frac{1}{K}\big) / (n + 1)`.
    Fit all candidates to all data, and predict by :meth:`~pyro_lvgp.models.Prediction.pool` with these weights.  The mixture
    may predict better than each of them.

    :param log_prob: nats of each hidden entry by name, such as of :func:`held_out_log_prob`.
    :param weight: weights of the entries in the mean over h, such as those of their rows; equal ones if None.
    :param num_independent: number n of independent observations that the entries are worth.  Entries of one gap in a series
        are no independent evidence: count the gaps.
    :param tolerance: bound on the difference from the maximum, in nats per entry, at which iterations stop.
    :param max_steps: maximum number of iterations.
    :returns: weights by name; a name is a string, or any other key.
    :raises ValueError: if there are no candidates or entries, candidates have different numbers of entries, an entry has
        no finite density under any candidate, or NaN under one, weights are not of the entries, or ``num_independent`` is not
        positive.

    Source: Yao, Vehtari, Simpson and Gelman (2018), "Using stacking to average Bayesian predictive
    distributions", Bayesian Analysis 13, 917-1003.

    >>> stacking_weights({"first": torch.tensor([-1.0, -3.0]), "second": torch.tensor([-3.0, -1.0])})
    {'first': 0.5, 'second': 0.5}
    """
    if not num_independent > 0.0:
        raise ValueError(f"expected a positive num_independent, got {num_independent}; count the gaps that are held out")
    if not log_prob or len({values.shape for values in log_prob.values()}) != 1:
        shapes = {name: list(values.shape) for name, values in log_prob.items()}
        raise ValueError(f"expected the log densities of the same entries from one candidate or more, got shapes {shapes}")
    stacked = torch.stack(list(log_prob.values())).double()
    if not (finite := stacked.logsumexp(0).isfinite()).any() or not finite.all():
        raise ValueError(
            "expected entries to each of which a candidate gives a finite density, none NaN, got "
            f"{int(finite.sum())} of {finite.numel()}"
        )
    share = _shares(weight, stacked)
    num_candidates = len(stacked)
    weights = torch.full((num_candidates,), 1.0 / num_candidates, dtype=stacked.dtype, device=stacked.device)
    prior_share, tiny = 1.0 / (1.0 + num_independent), torch.finfo(stacked.dtype).tiny
    for _ in range(max_steps):
        log_joint = weights.log()[:, None] + stacked
        likelihood = (stacked - log_joint.logsumexp(0)).exp() @ share
        # The prior is that of further entries, each of which has a density under one candidate alone.
        gain = (1.0 - prior_share) * likelihood + prior_share / (num_candidates * weights).clamp_min(tiny)
        if gain.max().log() < tolerance:
            break
        weights = weights * gain
    return dict(zip(log_prob, weights.tolist(), strict=True))


def _shares(weight: Tensor | None, stacked: Float[Tensor, "K H"]) -> Float[Tensor, " H"]:
    """Weights of the entries, of sum 1."""
    if weight is None:
        return stacked.new_full(stacked.shape[1:], 1.0 / stacked.shape[1])
    if weight.shape != stacked.shape[1:] or not (weight >= 0.0).all() or not 0.0 < float(weight.sum()) < math.inf:
        raise ValueError(
            f"expected {stacked.shape[1]} weights of entries, 0 or more and not all 0, got {list(weight.shape)} from "
            f"{float(weight.min())}; repeat the weights of rows for their entries"
        )
    return (weight / weight.sum()).to(stacked)
