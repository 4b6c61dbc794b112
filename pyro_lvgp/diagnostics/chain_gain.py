"""Gain of the bound by the chains of an annealed guide, datum by datum."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp.diagnostics.importance_weights import log_weights
from pyro_lvgp.guides import AutoAnnealedLangevin

__all__ = ["ChainGain", "chain_gain"]


@dataclass(frozen=True)
class ChainGain:
    """Bound of an annealed guide minus that of its base, in nats: of each datum [N], or of all data jointly [].

    :param value: estimate of the gain.
    :param standard_error: its standard error.
    """

    value: Float[Tensor, "..."]
    standard_error: Float[Tensor, "..."]

    @property
    def worse(self) -> Int[Tensor, " rows"]:
        """Indices of the data whose chains lower the bound, or diverge; worst first.

        A loss counts if it is more than 0.001 nats, and more than two standard errors.
        """
        value, error = self.value.reshape(-1), self.standard_error.reshape(-1)
        rows = (~(value >= -(2.0 * error).clamp_min(_NEGLIGIBLE))).nonzero()[:, 0]
        return rows[value[rows].nan_to_num(float("-inf")).argsort()]


@names_types
@pyro_lock
def chain_gain(
    model: Callable[..., Any],
    guide: AutoAnnealedLangevin,
    *args: Any,
    num_samples: int = 100,
    vectorize: bool = True,
    seed: int | None = 0,
    **kwargs: Any,
) -> ChainGain:
    r"""Estimate by how much the chains of an annealed guide raise the bound of each datum above that of their base.

    .. math:: E[\log w_K] - E[\log w_0]

    with the weights :math:`w_K` of chains of K transitions and those of draws from the base.  It is negative where step sizes
    are too large for the posterior of a datum: ``chain_gain(...).worse`` names these data.

    :param model: a Pyro model.
    :param guide: its annealed guide.
    :param args: arguments of both; with a mini-batch, its rows.
    :param num_samples: number of draws S of both.
    :param vectorize: False draws one by one, for models that do not broadcast over dimensions left of their plates.
    :param seed: seed of the draws; None draws from the global state.
    :raises TypeError: for a guide that is no ``AutoAnnealedLangevin``.

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     with pyro.plate("data", len(y)):
    ...         x = pyro.sample("x", dist.Normal(0.0, 1.0))
    ...         pyro.sample("y", dist.Normal(x, 0.5), obs=y)
    >>> gain = chain_gain(model, AutoAnnealedLangevin(model, local_plate="data"), torch.zeros(4))
    >>> gain.value.shape, gain.worse
    (torch.Size([4]), tensor([], dtype=torch.int64))
    """
    if not isinstance(guide, AutoAnnealedLangevin):
        raise TypeError(f"expected an AutoAnnealedLangevin, whose chains start from a base, got {type(guide).__name__}")
    options: Any = {"num_samples": num_samples, "vectorize": vectorize, "seed": seed}
    annealed = log_weights(model, guide, *args, **options, **kwargs)
    base = log_weights(model, guide.without_transitions, *args, local_plate=guide.local_plate, **options, **kwargs)
    value = annealed.mean(0) - base.mean(0)
    return ChainGain(value, ((annealed.var(0) + base.var(0)) / num_samples).sqrt())


_NEGLIGIBLE = 1e-3  # nats
