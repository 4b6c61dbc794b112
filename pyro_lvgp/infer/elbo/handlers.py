"""Gaussian sites that bounds marginalise in closed form: the statement of the model, and the handlers of bound and guide.

A model calls :func:`sample_moments` where it can take the expectation over a Gaussian site itself.  A bound runs the guide
inside :class:`EvaluateBound`, and the model inside :class:`MarginalizeGaussians`, which returns the moments of the guide.
A guide that runs the model itself does so inside :class:`MarginalizeOwnGaussians`.
"""

from typing import Any, NamedTuple

import pyro
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import Message, effectful
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types

__all__ = [
    "EvaluateBound",
    "MarginalizeGaussians",
    "MarginalizeOwnGaussians",
    "Moments",
    "gaussian_moments",
    "is_in_bound",
    "marginalizes_gaussians",
    "sample_moments",
]


class Moments(NamedTuple):
    """Moments of a Gaussian site.

    :param mean: draw of the site; its mean, if the site is marginalised.
    :param scale_tril: Cholesky factor of the covariance; None if the site was drawn.
    """

    mean: Tensor
    scale_tril: Tensor | None


@names_types
def sample_moments(name: str, fn: TorchDistributionMixin, *, infer: dict[str, Any] | None = None) -> Moments:
    r"""Sample a site that the model can marginalise in closed form.

    The site is sampled as by ``pyro.sample``, and traces record the draw.  A bound that marginalises Gaussian sites
    (:class:`~pyro_lvgp.infer.MeanFieldELBO`, or :class:`~pyro_lvgp.infer.ImportanceWeightedELBO` with ``marginalize=True``)
    returns the moments of the guide's Gaussian :math:`N(m, L L^T)` at that site instead of the draw.  The log density of what
    follows must then be its expectation over the site; everywhere else ``scale_tril`` is None.

    :param name: name of the site.
    :param fn: prior distribution over vectors.
    :param infer: as for ``pyro.sample``.
    :returns: the draw and None, or the mean ``[*batch, M]`` and the Cholesky factor ``[*batch, M, M]``.

    A linear regression, whose expected log likelihood subtracts half of :math:`\operatorname{Var}(x_n^T w)`:

    >>> import pyro.distributions as dist
    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.infer import MeanFieldELBO
    >>> def model(X, y):
    ...     w, scale_tril = sample_moments("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)
    ...         if scale_tril is not None:
    ...             pyro.factor("variance", -0.5 * (X @ scale_tril).square().sum(-1))
    >>> loss = MeanFieldELBO()(model, MeanFieldGuide(model, covariance={"w": "full"}))
    >>> loss(torch.ones(5, 2), torch.zeros(5)).shape
    torch.Size([])
    """
    options: Any = infer
    return _moments(Moments(pyro.sample(name, fn, infer=options), None), name=name)


@effectful(type="moments")
def _moments(drawn: Moments) -> Moments:
    """Send a message of type "moments" to the handlers of the site; they set its value to marginalise the site."""
    return drawn


class MarginalizeGaussians(Messenger):
    """Replace the draw of :func:`sample_moments` in a model by the moments of the guide's Gaussian at the site.

    A site that the guide does not have, or at which the guide is not Gaussian, remains drawn.

    :param guide_trace: trace of the guide, whose other sites must not depend on the marginalised ones.

    >>> import pyro.distributions as dist
    >>> from pyro import poutine
    >>> q = dist.MultivariateNormal(torch.ones(2), torch.eye(2))
    >>> trace = poutine.trace(lambda: pyro.sample("u", q)).get_trace()
    >>> model = lambda: sample_moments("u", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    >>> model().scale_tril is None, poutine.replay(MarginalizeGaussians(trace)(model), trace)().mean
    (True, tensor([1., 1.]))
    """

    def __init__(self, guide_trace: Trace):
        super().__init__()
        self._guide_trace = guide_trace

    def _pyro_post_moments(self, msg: Message) -> None:
        sites: Any = self._guide_trace.nodes
        if msg["name"] in sites:
            _set_moments(msg, sites[msg["name"]]["fn"])


class MarginalizeOwnGaussians(Messenger):
    """Replace the draw of :func:`sample_moments` by the moments of the distribution that the site was drawn from.

    Guides that run their model with posteriors in place of priors run it in this handler.
    """

    def __init__(self):
        super().__init__()
        self._distributions: dict[str | None, Any] = {}

    def _pyro_post_sample(self, msg: Message) -> None:
        self._distributions[msg["name"]] = msg["fn"]

    def _pyro_post_moments(self, msg: Message) -> None:
        _set_moments(msg, self._distributions.get(msg["name"]))


def _set_moments(msg: Message, fn: Any) -> None:
    """Set the value of a message of type "moments" if the distribution is Gaussian."""
    if (moments := gaussian_moments(fn)) is not None:
        msg["value"] = moments


class EvaluateBound(Messenger):
    """Declare that a bound of this library runs the guide for its value and gradients.

    :param marginalize: whether the bound marginalises Gaussian sites in closed form instead of using their draws.

    >>> is_in_bound(), EvaluateBound()(is_in_bound)(), EvaluateBound()(marginalizes_gaussians)()
    (False, True, False)
    """

    def __init__(self, *, marginalize: bool = False):
        super().__init__()
        self.marginalize = marginalize

    def _pyro_is_in_bound(self, msg: Message) -> None:
        msg["value"] = True

    def _pyro_marginalizes_gaussians(self, msg: Message) -> None:
        msg["value"] = self.marginalize or bool(msg["value"])


@effectful(type="is_in_bound")
def is_in_bound() -> bool:
    """Return whether a bound of this library runs the guide (see :class:`EvaluateBound`)."""
    return False


@effectful(type="marginalizes_gaussians")
def marginalizes_gaussians() -> bool:
    """Return whether a bound that marginalises Gaussian sites runs the guide."""
    return False


def gaussian_moments(fn: Any) -> Moments | None:
    """Return mean and Cholesky factor of the covariance of a Gaussian over vectors; None for any other distribution.

    >>> import pyro.distributions as dist
    >>> gaussian_moments(dist.Normal(torch.zeros(2), 3.0).to_event(1)).scale_tril
    tensor([[3., 0.],
            [0., 3.]])
    """
    if isinstance(fn, torch.distributions.MultivariateNormal):
        return Moments(fn.loc, fn.scale_tril)
    base = fn.base_dist if isinstance(fn, torch.distributions.Independent) else None
    if isinstance(base, torch.distributions.Normal) and len(fn.event_shape) == 1:
        return Moments(base.loc, torch.diag_embed(base.scale))
    return None
