r"""Natural-gradient updates of Gaussian sites: pure tensor functions.

A site :math:`l(f_n) \propto \exp(h_n f_n - \tfrac12 \Lambda_n f_n^2)` has the natural parameters h, precision times mean, and
:math:`\Lambda`, the precision.  Conjugate-computation variational inference ascends the bound
:math:`E_q[\log p(y \mid f)] - KL(q \| p)` along its natural gradient by

.. math::

    \Lambda \leftarrow (1 - \rho) \Lambda + \rho\, C, \qquad h \leftarrow (1 - \rho) h + \rho\, (g + C m), \qquad
    g = \frac{\partial}{\partial m} E_q[\log p], \quad C = -2 \frac{\partial}{\partial v} E_q[\log p],

with the means m and variances v of q.  By the theorems of Bonnet and Price g and C are the expectations of the gradient and of
minus the second derivatives of the log likelihood.

Source: Khan and Lin (2017), "Conjugate-computation variational inference".
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["NaturalSites", "natural_gradient_step"]


class NaturalSites(NamedTuple):
    """Natural parameters of Gaussian sites.

    :param information: h, precision times mean.
    :param precision: Λ.
    """

    information: Float[Tensor, "*batch"]
    precision: Float[Tensor, "*batch"]

    @property
    def mean(self) -> Float[Tensor, "*batch"]:
        """Means h / Λ; h where the precision is zero."""
        return self.information / torch.where(self.precision > 0.0, self.precision, 1.0)


def natural_gradient_step(
    sites: NaturalSites,
    mean: Float[Tensor, "*#batch"],
    gradient: Float[Tensor, "*#batch"],
    curvature: Float[Tensor, "*#batch"],
    step: Float[Tensor, "*#batch"],
) -> NaturalSites:
    """Move sites along the natural gradient of the bound.

    :param sites: current sites.
    :param mean: means m of q.
    :param gradient: g, the expected gradient of the log likelihood.
    :param curvature: C ≥ 0, which takes the place of the expected negative second derivative.
    :param step: step size ρ between 0 and 1; 1 replaces the sites.

    One step of size 1 gives the exact site of y = 2 f + ε with ε ~ N(0, 1) from any q:

    >>> m, y = torch.tensor([5.0]), torch.tensor([3.0])
    >>> start = NaturalSites(torch.zeros(1), torch.ones(1))
    >>> natural_gradient_step(start, m, 2.0 * (y - 2.0 * m), torch.tensor([4.0]), torch.ones(1))
    NaturalSites(information=tensor([6.]), precision=tensor([4.]))
    """
    information = sites.information + step * (gradient + curvature * mean - sites.information)
    return NaturalSites(information, sites.precision + step * (curvature - sites.precision))
