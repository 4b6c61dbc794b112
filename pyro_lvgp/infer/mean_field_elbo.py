"""The mean-field bound with Gaussian sites integrated out."""

from typing import Any

import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.infer.util import is_validation_enabled, torch_item
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites
from pyro.util import check_model_guide_match, warn_if_nan
from torch import Tensor

from pyro_lvgp.infer._terms import check_reparameterised, log_ratio
from pyro_lvgp.infer.integration import IntegrateGaussians


class MeanFieldELBO(ELBO):
    r"""The mean-field bound, drawing only what has to be drawn.

    Like Pyro's ``TraceMeanField_ELBO`` it uses the analytic KL of each site where there is one.  Beyond that, sites over which
    the model can integrate (``u`` of our Gaussian-process models, see :class:`~pyro_lvgp.infer.IntegrateGaussians`) enter by
    their moments under the guide, so that with :math:`f_{nd} \sim N(A_n^T m_d,\; s_n + A_n^T S_d A_n)` the bound

    .. math::

        E_{q(x)}\Big[\sum_{nd} E_{q(f_{nd} \mid x_n)} \log p(y_{nd} \mid f_{nd})\Big] - KL(q(x) \| p(x)) - KL(q(u) \| p(u))

    has the noise of x alone.  The guide's sites must be reparameterised, and must not depend on each other.

    Arguments are those of Pyro's bounds (``num_particles``, ``vectorize_particles``, ``max_plate_nesting``, …).

    Source: Titsias and Lawrence (2010); eq. 3 of the annealed-GPLVM paper.

    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> Y = torch.randn(20, 3)
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5)
    >>> loss = MeanFieldELBO()(model, MeanFieldGuide(model))
    >>> loss(Y).backward()
    """

    def loss(self, model: Any, guide: Any, *args, **kwargs) -> float:
        """Minus an estimate of the bound, without gradients."""
        with torch.no_grad():
            return torch_item(self.differentiable_loss(model, guide, *args, **kwargs))

    def loss_and_grads(self, model: Any, guide: Any, *args, **kwargs) -> float:
        """Minus an estimate of the bound; its gradients are added to the parameters'."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            loss.backward(retain_graph=self.retain_graph)
        value = torch_item(loss)
        warn_if_nan(value, "loss")
        return value

    def differentiable_loss(self, model: Any, guide: Any, *args, **kwargs) -> Tensor:
        """Minus an estimate of the bound, to differentiate."""
        traces = self._get_traces(model, guide, args, kwargs)
        return -sum(self._bound(*pair) for pair in traces) / self.num_particles

    def _get_trace(self, model: Any, guide: Any, args: tuple, kwargs: dict) -> tuple[Trace, Trace]:
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        model = poutine.replay(IntegrateGaussians(guide_trace)(model), guide_trace)
        model_trace = poutine.trace(model).get_trace(*args, **kwargs)
        if is_validation_enabled():
            check_model_guide_match(model_trace, guide_trace, self.max_plate_nesting)
        return prune_subsample_sites(model_trace), prune_subsample_sites(guide_trace)

    @staticmethod
    def _bound(model_trace: Trace, guide_trace: Trace) -> Tensor:
        model_sites, guide_sites = (
            {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}
            for trace in (model_trace, guide_trace)
        )
        check_reparameterised(guide_sites)
        return log_ratio(model_sites, guide_sites)
