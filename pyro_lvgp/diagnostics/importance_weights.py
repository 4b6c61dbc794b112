"""Importance weights of a guide, their effective sample size, and Pareto k̂."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_sizes, check_tensors
from pyro_lvgp.diagnostics._local_plate import find_local_plate
from pyro_lvgp.infer import ImportanceWeightedELBO, sample_traces
from pyro_lvgp.ops import resampling

__all__ = ["effective_sample_size", "log_weights", "pareto_k"]


@names_types
@pyro_lock
def log_weights(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_samples: int = 100,
    local_plate: str | None = None,
    vectorize: bool = True,
    seed: int | None = 0,
    **kwargs: Any,
) -> Float[Tensor, "S ..."]:
    r"""Compute log importance weights of draws from a guide.

    For the sites of a plate over data, :math:`\log w_{sn} = \log p(y_n, x_{ns} \mid g) - \log q(x_{ns} \mid g)` at one draw of
    the globals g, shaped [S, N]; without such a plate :math:`\log w_s = \log p(y, z_s) - \log q(z_s)`, shaped [S].

    :param model: a Pyro model.
    :param guide: its guide.
    :param args: arguments of both; with a mini-batch, weights of its rows.
    :param num_samples: number of draws S.
    :param local_plate: name of the plate over data; by default the guide's ``local_plate`` or the model's, if there is
        one for the data.
    :param vectorize: False draws one by one, for models that do not broadcast over dimensions left of their plates.
    :param seed: seed of the draws; None draws from the global state.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> def model(y):
    ...     with pyro.plate("data", len(y)):
    ...         x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...         pyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> log_weights(model, MeanFieldGuide(model), torch.zeros(4), num_samples=10, local_plate="data").shape
    torch.Size([10, 4])
    """
    check_sizes(num_samples=num_samples)
    plate = find_local_plate(model, guide, local_plate, args, kwargs, seed=seed)
    if plate is None:
        options: Any = {"chunk_size": 1000, "predict": False, "log_likelihood": False}
        options |= {"vectorize": vectorize, "seed": seed}
        draws = sample_traces(model, guide, *args, num_samples=num_samples, **options, **kwargs)
        return draws.log_p - draws.log_q
    num_calls, chunk_size = (1, num_samples) if vectorize else (num_samples, 1)
    bound = ImportanceWeightedELBO(plate, chunk_size, marginalize=False)
    with torch.no_grad(), seeded(seed):
        return torch.cat([bound.log_weights(model, guide, *args, **kwargs) for _ in range(num_calls)])


@names_types
def effective_sample_size(log_weights: Float[Tensor, "S *batch"]) -> Float[Tensor, "*batch"]:
    """Compute Kish's effective sample size ``(Σ_s w_s)² / Σ_s w_s²`` of the S draws, between 1 and S.

    :param log_weights: log weights, draws first.
    :raises ValueError: for log weights without entries.
    :raises TypeError: for log weights that are not of a floating-point dtype.

    >>> effective_sample_size(torch.zeros(8, 2))
    tensor([8., 8.])
    """
    _check_log_weights(log_weights)
    return resampling.effective_sample_size(log_weights)


@names_types
def pareto_k(log_weights: Float[Tensor, "S *batch"]) -> Float[Tensor, "*batch"]:
    """Estimate the shape k̂ of a generalised Pareto distribution of the largest weights.

    Above 0.7 the guide is too far from the posterior for importance weights to correct it.  The result is −∞ for equal
    weights, ∞ if all but a few weights are negligible beside the largest, and NaN if a weight is NaN.

    :param log_weights: log weights, draws first; a reliable estimate needs some hundred draws.
    :raises ValueError: with fewer than 25 draws, or log weights without entries.
    :raises TypeError: for log weights that are not of a floating-point dtype.

    Source: Vehtari et al. (2024), "Pareto smoothed importance sampling"; Yao et al. (2018), "Yes, but did it work?".

    >>> pareto_k(torch.randn(200, 2)).shape
    torch.Size([2])
    """
    _check_log_weights(log_weights)
    S = len(log_weights)
    if S < 25:
        raise ValueError(f"expected 25 draws or more to fit a tail, got {S}; some hundred are better")
    tail = math.ceil(min(0.2 * S, 3.0 * math.sqrt(S)))
    rounding = _ROUNDINGS * torch.finfo(log_weights.dtype).eps * (1.0 + log_weights.abs().nan_to_num(posinf=0.0).amax(0))
    columns = (log_weights - log_weights.amax(0)).double().reshape(S, -1).sort(0).values[-tail - 1 :].exp().T
    excesses = columns[:, 1:] - columns[:, :1]
    shapes = [_tail_shape(*each) for each in zip(excesses, rounding.reshape(-1).tolist(), strict=True)]
    return torch.as_tensor(shapes, dtype=log_weights.dtype, device=log_weights.device).reshape(log_weights.shape[1:])


def _check_log_weights(log_weights: Tensor) -> None:
    """Raise unless there are draws in the first dimension, of a floating-point dtype."""
    check_tensors([log_weights])
    if not log_weights.is_floating_point():
        raise TypeError(f"expected log_weights of a floating-point dtype, got {log_weights.dtype}; use log_weights.double()")
    if not log_weights.numel() or not log_weights.dim():
        raise ValueError(f"expected log_weights [draws, ...] with one draw or more, got {list(log_weights.shape)}")


def _tail_shape(excess: Float[Tensor, " tail"], rounding: float) -> float:
    """Estimate k̂ from sorted excesses over a threshold; zero excesses are ignored, and equal ones have k̂ = −∞.

    Excesses are equal if they are below the rounding errors of the weights, as those of an exact posterior.
    """
    positive = excess[excess > 0.0]
    if torch.isnan(excess).any():
        return math.nan
    if not len(positive) or positive[-1] <= rounding or (len(positive) >= _MIN_EXCESSES and positive[0] == positive[-1]):
        return -math.inf
    return fit_generalized_pareto(positive)[0] if len(positive) >= _MIN_EXCESSES else math.inf


_MIN_EXCESSES = 5  # to fit a tail to
_ROUNDINGS = 64.0  # of the sums that a log weight is made of
