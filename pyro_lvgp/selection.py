"""Choice between models by what they predict of entries that are hidden in addition.

Bounds of different models, and of different runs of one, need not stand in the order of what they predict.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import pyro
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm


class Predictive(Protocol):
    """What a model predicts: for example a :class:`~pyro_lvgp.models.MixturePrediction`, or a ``Normal`` of entries."""

    def log_prob(self, y: Tensor, /) -> Tensor:
        """Log density, entry by entry."""
        ...


def gap_folds(
    y: Float[Tensor, "..."], num_folds: int = 3, *, consecutive: bool = False, seed: int = 0
) -> Bool[Tensor, "folds N D"]:
    """Entries to hide from a fit and to predict, in folds with gaps like those of the data.

    Rows without a gap are dealt out to the folds; a fold hides its rows in all columns that have gaps elsewhere.

    :param y: data [N, D], NaN where missing.
    :param num_folds: number of folds.
    :param consecutive: deal out runs of rows, for gaps that are blocks of time, and not rows here and there.
    :param seed: of the rows here and there.
    :raises ValueError: if the data are no matrix, have no gap, or fewer complete rows than folds.

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
    if y.dim() != 2:
        raise ValueError(f"expected data [rows, columns], got {list(y.shape)}; make folds of each series, and stack them")
    missing = torch.isnan(y)
    complete = (~missing.any(1)).nonzero().squeeze(1)
    if not missing.any():
        raise ValueError("expected data with gaps to imitate, got complete data; hide entries of your choice as folds")
    if not 1 <= num_folds <= len(complete):
        raise ValueError(f"expected from 1 to {len(complete)} folds, the number of rows without a gap, got {num_folds}")
    if not consecutive:
        order = torch.randperm(len(complete), generator=torch.Generator().manual_seed(seed))
        complete = complete[order.to(y.device)]
    folds = torch.zeros(num_folds, *y.shape, dtype=torch.bool, device=y.device)
    for fold, rows in zip(folds, complete.tensor_split(num_folds), strict=True):
        fold[rows] = missing.any(0)
    return folds


def held_out_nll(
    candidates: Mapping[str, Callable[[Tensor], Predictive]],
    y: Float[Tensor, "*shape"],
    folds: Iterable[Bool[Tensor, "..."]],
    *,
    progress: bool = True,
) -> dict[str, float]:
    r"""Mean negative log density of hidden entries for each candidate, from the best to the worst.

    .. math::

        -\frac{1}{\sum_k |H_k|} \sum_k \sum_{(n, d) \in H_k} \log p(y_{nd} \mid y_{O \setminus H_k})

    with the entries :math:`H_k` of fold k and all observed ones O.  Take the first candidate, and fit it to all data.  Each
    fit has a Pyro parameter store of its own.

    :param candidates: for each name a function that fits a new model to data in which more is NaN, and predicts all entries.
    :param y: data, NaN where missing.
    :param folds: what to hide, each of the shape of the data, such as :func:`gap_folds`.
    :param progress: show a progress bar.
    :returns: nats per entry by name.
    :raises ValueError: if the folds are not of the shape of the data or hide nothing that was observed, or a candidate
        predicts NaN or for other shapes.

    >>> from torch.distributions import Normal
    >>> y = torch.tensor([[0.0, 1.0], [0.1, 1.1], [0.2, torch.nan]])
    >>> def columns(y):
    ...     return Normal(y.nanmean(0), 0.1)
    >>> def everything(y):
    ...     return Normal(y.nanmean(), 0.5)
    >>> list(held_out_nll({"everything": everything, "columns": columns}, y, gap_folds(y, 2), progress=False))
    ['columns', 'everything']
    """
    folds = list(folds)
    for fold in folds:
        if fold.shape != y.shape:
            raise ValueError(f"expected folds of the data's shape {list(y.shape)}, got {list(fold.shape)}; see gap_folds")
    held = [fold & ~torch.isnan(y) for fold in folds]
    number = sum(int(fold.sum()) for fold in held)
    if number == 0:
        raise ValueError("expected folds that hide observed entries, got none")
    scores = {}
    with tqdm(total=len(candidates) * len(held), disable=not progress, unit="fit") as bar:
        for name, predict in candidates.items():
            bar.set_description(name)
            total = 0.0
            for fold in held:
                with pyro.get_param_store().scope():  # no fit starts where another ended
                    log_prob = predict(y.masked_fill(fold, torch.nan)).log_prob(torch.nan_to_num(y))
                if log_prob.shape != y.shape:
                    raise ValueError(
                        f"expected log densities of shape {list(y.shape)} from candidate {name!r}, one for each entry, got "
                        f"{list(log_prob.shape)}; does its distribution take entries as one event?"
                    )
                total -= log_prob[fold].sum().item()
                bar.update()
            if math.isnan(total):
                raise ValueError(f"expected log densities from candidate {name!r}, got NaN; does it predict what is hidden?")
            scores[name] = total / number
    return dict(sorted(scores.items(), key=lambda item: item[1]))
