r"""Resampling of weighted draws, in which weights keep their mean.

Draw s becomes a copy of draw :math:`a_s`, its ancestor, with the expected number :math:`S V_s` of copies of draw s, where
:math:`V_s = w_s / \sum_{s'} w_{s'}`.  Copies have the weight :math:`w_a / (S V_a)`, which is the mean of the weights, so
that :math:`\sum_s w_s f(h_s)` keeps its expectation for every function f.

Source: Carpenter, Clifford and Fearnhead (1999), "Improved particle filter for nonlinear problems", for systematic resampling;
Liu and Chen (1995), "Blind deconvolution via sequential imputations", for the effective sample size as a criterion.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Resampled", "effective_sample_size", "resample", "systematic_ancestors"]


class Resampled(NamedTuple):
    """Ancestors of draws, and the factors of the weights of the ancestors.

    :param ancestors: index of the draw that each draw becomes a copy of.
    :param log_factor: logarithm of the factor by which the weight of the ancestor is multiplied.
    """

    ancestors: Int[Tensor, "S *batch"]
    log_factor: Float[Tensor, "S *batch"]


def systematic_ancestors(
    log_weights: Float[Tensor, "S *batch"], uniform: Float[Tensor, "*batch"], num_copies: int | None = None
) -> Int[Tensor, "T *batch"]:
    r"""Compute the ancestors of systematic resampling.

    .. math:: a_t = \min \Big\{ i : \sum_{j \le i} V_j \ge \frac{t + v}{T} \Big\}, \qquad t = 0 \dots T - 1

    Draw i has :math:`\lfloor T V_i \rfloor` or :math:`\lceil T V_i \rceil` copies.

    :param log_weights: logarithms of weights, draws first.
    :param uniform: v in (0, 1]; with 0 included, a draw of weight 0 could be copied.
    :param num_copies: number T of copies of all draws together; by default one for each draw.

    >>> systematic_ancestors(torch.tensor([0.5, 0.0, 0.25, 0.25]).log(), torch.tensor(0.5))
    tensor([0, 0, 2, 3])
    """
    num_draws = len(log_weights)
    num_copies = num_draws if num_copies is None else num_copies
    cumulative = log_weights.softmax(0).movedim(0, -1).cumsum(-1)
    cumulative = cumulative / cumulative[..., -1:]  # at most 1 without rounding
    points = (torch.arange(num_copies, device=uniform.device) + uniform.unsqueeze(-1)) / num_copies
    found = torch.searchsorted(cumulative.contiguous(), points.to(cumulative).contiguous())
    return found.clamp_max(num_draws - 1).movedim(-1, 0)  # weights that are NaN have no ancestors


def effective_sample_size(log_weights: Float[Tensor, "S *batch"]) -> Float[Tensor, "*batch"]:
    r"""Compute Kish's effective sample size, between 1 and S.

    .. math:: \Big(\sum_s w_s\Big)^2 \Big/ \sum_s w_s^2

    :param log_weights: logarithms of weights, draws first.

    >>> effective_sample_size(torch.tensor([0.5, 0.0, 0.5]).log())
    tensor(2.)
    """
    weights = (log_weights - log_weights.amax(0)).exp()
    return weights.sum(0).square() / weights.square().sum(0)


def resample(log_weights: Float[Tensor, "S *batch"], uniform: Float[Tensor, "*batch"], threshold: float) -> Resampled:
    r"""Resample the draws of each batch entry whose :func:`effective_sample_size` is below τ S.

    The draws of other batch entries are their own ancestors, and their weights remain.

    :param log_weights: logarithms of weights, draws first.
    :param uniform: a number in (0, 1] for each batch entry.
    :param threshold: τ.

    >>> log_weights = torch.tensor([[0.5, 0.2], [0.0, 0.3], [0.5, 0.5]]).log()
    >>> ancestors, log_factor = resample(log_weights, torch.tensor([0.6, 0.6]), 0.7)
    >>> ancestors.mT, (log_weights.gather(0, ancestors) + log_factor).exp().mT
    (tensor([[0, 2, 2],
            [0, 1, 2]]), tensor([[0.3333, 0.3333, 0.3333],
            [0.2000, 0.3000, 0.5000]]))
    """
    num_draws = len(log_weights)
    is_resampled = effective_sample_size(log_weights) < threshold * num_draws
    own = torch.arange(num_draws, device=log_weights.device).reshape(-1, *(1,) * uniform.dim())
    ancestors = torch.where(is_resampled, systematic_ancestors(log_weights, uniform), own)
    log_shares = log_weights.log_softmax(0).gather(0, ancestors) + math.log(num_draws)
    return Resampled(ancestors, torch.where(is_resampled, -log_shares, 0.0))
