"""Delta distribution that carries the log density of a random path."""

import pyro.distributions as dist
from torch.distributions import register_kl


class PathDelta(dist.Delta):
    """A Delta at the end of a random path, with the log density of that path.

    Pyro's KL of a ``Delta`` leaves out ``log_density``; that of this class, log q − log p at the one point, does not.
    """


@register_kl(PathDelta, dist.Distribution)
def _kl_path(q, p):
    return q.log_density - p.log_prob(q.v)
