"""Upper limits of log densities over all parameters but scales."""

import math
from functools import singledispatch
from typing import Any

import torch
from pyro.distributions import Delta, MaskedDistribution, Unit
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.distributions.util import sum_rightmost
from torch import Tensor

__all__ = ["log_prob_limit"]


@singledispatch
def log_prob_limit(fn: Any, value: Tensor) -> Tensor:
    """Compute the largest log density that a value can have under distributions of the family and scale of ``fn``.

    It is 0 for discrete distributions, and infinity for families of which it is not known.

    :param fn: a distribution.
    :param value: a value in its support.
    :returns: limits of the shape of ``fn.log_prob(value)``.

    >>> log_prob_limit(torch.distributions.Normal(3.0, 0.1), torch.tensor(0.0))  # −log(0.1 √2π)
    tensor(1.3836)
    """
    try:
        is_discrete = fn.support.is_discrete and not isinstance(fn, Delta | Unit)
    except NotImplementedError:
        is_discrete = False
    shape = torch.broadcast_shapes(fn.batch_shape, value.shape[: value.dim() - len(fn.event_shape)])
    return value.new_full(shape, 0.0 if is_discrete else math.inf)


@log_prob_limit.register
def _normal(fn: torch.distributions.Normal, value: Tensor) -> Tensor:
    return (-(fn.scale.log() + 0.5 * math.log(2.0 * math.pi))).expand(torch.broadcast_shapes(fn.batch_shape, value.shape))


@log_prob_limit.register
def _log_normal(fn: torch.distributions.LogNormal, value: Tensor) -> Tensor:
    return log_prob_limit(fn.base_dist, value.log()) - value.log()


@log_prob_limit.register
def _student_t(fn: torch.distributions.StudentT, value: Tensor) -> Tensor:
    return fn.log_prob(fn.loc).expand(torch.broadcast_shapes(fn.batch_shape, value.shape))


@log_prob_limit.register
def _independent(fn: torch.distributions.Independent, value: Tensor) -> Tensor:
    return sum_rightmost(log_prob_limit(fn.base_dist, value), fn.reinterpreted_batch_ndims)


@log_prob_limit.register
def _masked(fn: MaskedDistribution, value: Tensor) -> Tensor:
    return torch.where(torch.as_tensor(fn._mask, device=value.device), log_prob_limit(fn.base_dist, value), 0.0)


@log_prob_limit.register
def _expanded(fn: ExpandedDistribution, value: Tensor) -> Tensor:
    return log_prob_limit(fn.base_dist, value).expand(torch.broadcast_shapes(fn.batch_shape, value.shape))
