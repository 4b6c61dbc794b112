r"""Resampling of annealed chains between transitions: an annealed importance sampler becomes a sequential Monte Carlo sampler.

After k transitions a chain has the weight

.. math:: w(k) = \frac{q_k(z_k)}{q_0(z_0)} \prod_{j \le k} \frac{r_j(z_{j-1} \mid z_j)}{t_j(z_j \mid z_{j-1})}

for the bridging density :math:`q_k`, with momenta distributed as in equilibrium.  The S chains of a datum are replaced by
copies of chains chosen with the probabilities :math:`V_s \propto w_s(k)`.  The last weight of a path is divided by
:math:`S V_a` at each resampling, where a is the chain that it was copied from.  The mean of the last weights over s is then
the estimate of sequential Monte Carlo, and its expectation is Z for all functions V of the states so far.  Hence V is a
constant for gradients: for V fixed as a function of the noise, the gradient of the mean weight is unbiased.

Source: Del Moral, Doucet and Jasra (2006), "Sequential Monte Carlo samplers"; Whiteley, Lee and Heine (2016), "On the role of
interaction in sequential Monte Carlo algorithms", for resampling of some of the chains; Ścibior and Wood (2021),
"Differentiable particle filtering without modifying the forward pass", for the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor

from pyro_lvgp.guides.annealed._targets import TargetOfEntries
from pyro_lvgp.guides.annealed.transitions import Coordinates, State
from pyro_lvgp.ops.resampling import resample


@dataclass(frozen=True)
class ChainResampling:
    """Resampling of the chains of each datum.

    :param threshold: chains are resampled if their effective sample size is below this share of their number.
    :param dims: batch dimensions with a weight for each entry: first that of the chains of a datum, which is the leftmost.
    :param event_dims: number of dimensions of an event of each site.
    """

    threshold: float
    dims: tuple[int, ...]
    event_dims: Sequence[int]

    def start(self, state: State) -> State:
        """Return the state with minus the log density of the base in ``log_ratio``, up to a constant, to be copied with it."""
        return state._replace(log_ratio=_add(state.log_ratio, state.z, 0.5))

    def finish(self, log_ratio: Coordinates, z: Coordinates) -> Coordinates:
        """Return log ratios that, with the log density of the base at z, are those of the paths.

        :param log_ratio: log ratios of the last state.
        :param z: first positions.
        """
        return _add(log_ratio, z, -0.5)

    def __call__(self, target: TargetOfEntries, state: State, beta: Tensor) -> State:
        """Resample the chains of each datum whose weights are uneven.

        :param target: the target of the chains.
        :param state: state after a transition.
        :param beta: inverse temperature β of that transition.
        """
        with torch.no_grad():
            log_p = target.log_joint_of_entries(state.z, self.dims)
            terms = [total - 0.5 * (1.0 - beta) * z.square() for total, z in zip(state.log_ratio, state.z, strict=True)]
            log_w = beta * log_p + sum(sum_rightmost(x, n) for x, n in zip(terms, self.event_dims, strict=True))
            uniform = 1.0 - torch.rand_like(log_w[0])
            ancestors, log_factor = resample(log_w, uniform, self.threshold)
        copied = State(*(tuple(self._copies(part, ancestors)) for part in state))
        first, *others = copied.log_ratio
        # Spread over the event, of which only the sum matters.
        num_entries = first.shape[log_factor.dim() :].numel()
        first = first + _beside_event(log_factor, self.event_dims[0]) / num_entries
        return copied._replace(log_ratio=(first, *others))

    def _copies(self, part: Coordinates, ancestors: Tensor) -> list[Tensor]:
        return [
            x.gather(0, _beside_event(ancestors, event_dim).expand_as(x))
            for x, event_dim in zip(part, self.event_dims[: len(part)], strict=True)
        ]


def _add(totals: Coordinates, z: Coordinates, factor: float) -> Coordinates:
    return tuple(total + factor * x.square() for total, x in zip(totals, z, strict=True))


def _beside_event(x: Tensor, event_dim: int) -> Tensor:
    return x.reshape(x.shape + (1,) * event_dim)
