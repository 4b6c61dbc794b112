"""Base class of distributions over vectors of function values."""

import pyro.distributions as dist
import torch
from pyro.distributions import constraints

__all__ = ["FunctionValues"]


class FunctionValues(dist.TorchDistribution):
    """Distribution over vectors of function values, whose expanded batches share all factorisations.

    A subclass sets ``_unexpanded = self`` before it calls ``super().__init__``, and computes cached properties for
    ``_unexpanded`` alone.
    """

    arg_constraints = {}  # noqa: RUF012
    support = constraints.real_vector
    has_rsample = True

    def expand(self, batch_shape, _instance=None):
        new = self._get_checked_instance(type(self), _instance)
        # Cached properties are shared; those not computed yet are computed for the unexpanded batch.
        new.__dict__.update(self.__dict__, _unexpanded=self._unexpanded)
        new._batch_shape = torch.Size(batch_shape)
        return new

    @property
    def _full_shape(self) -> torch.Size:
        return self.batch_shape + self.event_shape
