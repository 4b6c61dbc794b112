"""Delta distribution with the log density of a random path."""

import pyro.distributions as dist
from torch.distributions import register_kl

__all__ = ["PathDelta"]


class PathDelta(dist.Delta):
    """Delta distribution at the end of a random path, with the log density of the path.

    Pyro's KL of a ``Delta`` omits ``log_density``.  The KL of this class is log q − log p at the point.
    """


@register_kl(PathDelta, dist.Distribution)
def _kl_path(q, p):
    return q.log_density - p.log_prob(q.v)
