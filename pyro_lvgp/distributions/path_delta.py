"""Delta distribution with the log density of a random path."""

import pyro.distributions as dist
from torch.distributions import register_kl

__all__ = ["PathDelta"]


class PathDelta(dist.Delta):
    """Delta distribution at the end of a random path, with the log density of the path.

    Pyro's KL of a ``Delta`` omits ``log_density``.  The KL of this class is log q − log p at the point.

    >>> import torch
    >>> q = PathDelta(torch.tensor(0.0), log_density=torch.tensor(-1.0))
    >>> torch.distributions.kl_divergence(q, dist.Normal(0.0, 1.0))  # −1 − log N(0; 0, 1)
    tensor(-0.0811)
    """


@register_kl(PathDelta, dist.Distribution)
def _kl_path(q, p):
    return q.log_density - p.log_prob(q.v)
