"""Mean-field bound with Gaussian sites marginalised in closed form."""

import math

from torch import Tensor

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp.infer.elbo._terms import Sites, log_ratio
from pyro_lvgp.infer.elbo.local_plate import LocalELBO

__all__ = ["MeanFieldELBO"]


class MeanFieldELBO(LocalELBO):
    r"""Mean-field bound that marginalises Gaussian sites in closed form.

    Like Pyro's ``TraceMeanField_ELBO`` it uses the analytic KL divergence of each site where there is one.  In addition, sites
    that the model can marginalise (``u`` of our Gaussian-process models, see :func:`~pyro_lvgp.infer.sample_moments`) are
    replaced by their moments under the guide.  With with :math:`f_{nd} \sim N(A_n^T m_d,\; s_n + A_n^T S_d A_n)` the bound

    .. math::

        E_{q(x)}\Big[\sum_{nd} E_{q(f_{nd} \mid x_n)} \log p(y_{nd} \mid f_{nd})\Big] - KL(q(x) \| p(x)) - KL(q(u) \| p(u))

    depends on draws of x only.  The guide's sites must be reparameterised, and must not depend on each other.

    :param local_plate: name of the plate over data, which the model need not have.
    :param num_samples: number of draws of the local sites to average over; more draws give gradients with less noise.
    :param num_particles: number of draws of all sites to average over.
    :param max_plate_nesting: as for Pyro's bounds; found by running model and guide once if omitted.
    :raises ValueError: if a guide site cannot be reparameterised, or a site outside the plate has a dimension of draws inside
        it.  (A sum over draws, ``x.sum()``, has no such dimension and is not detected: avoid such sites, or use
        ``num_samples=1``.)

    Source: Titsias and Lawrence (2010); eq. 3 of the annealed-GPLVM paper.

    >>> import torch
    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> Y = torch.randn(20, 3)
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5)
    >>> loss = MeanFieldELBO()(model, MeanFieldGuide(model))
    >>> loss(Y).backward()
    """

    @checks_types
    def __init__(
        self,
        local_plate: str = "data",
        num_samples: int = 2,
        *,
        num_particles: int = 1,
        max_plate_nesting: int | float = math.inf,
    ):
        super().__init__(
            local_plate, num_samples, marginalize=True, num_particles=num_particles, max_plate_nesting=max_plate_nesting
        )

    def particle_bound(self, model_sites: Sites, guide_sites: Sites) -> Tensor:
        local_model, global_model = self._split(model_sites)
        local_guide, global_guide = self._split(guide_sites)
        return log_ratio(local_model, local_guide) / self.num_samples + log_ratio(global_model, global_guide)
