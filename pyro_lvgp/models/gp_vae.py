"""Gaussian-process variational autoencoder of series and fields."""

from typing import Any

import pyro
from jaxtyping import Float, Int
from pyro import poutine
from pyro.poutine import Trace
from torch import Tensor, nn

from pyro_lvgp.distributions.gaussian_process import GaussianProcess, StructuredPosterior
from pyro_lvgp.distributions.markov import StateSpacePosterior
from pyro_lvgp.distributions.normal import without_independent
from pyro_lvgp.infer.protocols import LatentSymmetry
from pyro_lvgp.kernels import Kernel
from pyro_lvgp.likelihoods import Likelihood
from pyro_lvgp.models.latent_process_model import LatentProcessModel, as_inputs, is_one_series
from pyro_lvgp.ops.quasi_monte_carlo import qmc_normal

__all__ = ["GPVAE"]


class GPVAE(LatentProcessModel):
    r"""Gaussian-process variational autoencoder: independent processes over time or space, and a decoder for each point.

    .. math::

        f_k \sim GP(0, k_k), \quad k = 1 \dots Q, \qquad w_n \sim N(0, I_R), \qquad
        y_n \sim p\big(y \mid \mathrm{decoder}(f_n, w_n)\big)

    for N points of one series, or of each of B series that share kernels and decoder.  Missing entries are NaN.  Series of
    different lengths are padded with rows of NaN.

    Sites: ``f`` [B, 1, Q, N] in plate ``series``; with ``independent_dim``, ``w`` [B, N, R] in plates ``series`` and
    ``points``; ``y`` [B, N, D], observed, in both plates; and parameters with a ``PyroSample`` prior.  For one series the
    sites are without the dimension B and the plate ``series`` (``f`` [Q, N]).

    :param kernel: covariance with a batch dimension over the Q latent processes, such as ``RBF(1, batch_shape=(Q,))`` or a
        :class:`~pyro_lvgp.kernels.Stack` of different ones.
    :param decoder: a module that maps latents ``[*, Q + R]`` to the function values ``[*, D]`` under the likelihood; or to a
        pair of function values and the likelihood's parameter, such as a variance, for each entry.
    :param likelihood: p(y | decoder(f)); ``Gaussian()`` by default, one noise variance for all outputs.
        ``Gaussian(data_dim=D)`` has one for each output, for more accurate imputations of outputs with different noise.
    :param independent_dim: number R of latent dimensions that are independent from point to point.
    :param num_data: number of series, or of points of the one series; needed with mini-batches only.
    :raises ValueError: if the data do not fit, or a mini-batch comes without ``num_data``.

    Source: eqs. 3.1 to 3.4 of the GP-VAE thesis.

    >>> import torch
    >>> from pyro_lvgp.guides import StructuredGPGuide
    >>> from pyro_lvgp.infer import StructuredELBO
    >>> from pyro_lvgp.kernels import RBF
    >>> from pyro_lvgp.networks import MLP, IndexNet
    >>> from pyro_lvgp.infer import fit
    >>> model = GPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), MLP(2, 3))
    >>> guide = StructuredGPGuide(model, encoders={"f": IndexNet(3, 2)})
    >>> t, y = torch.linspace(0.0, 1.0, 20)[:, None], torch.randn(20, 3)
    >>> history = fit(model, guide, t, y, loss=StructuredELBO(), num_steps=3, progress=False)
    >>> model.predict(guide, t, y, torch.tensor([[1.1], [1.2]])).mean.shape
    torch.Size([2, 3])
    """

    gp_site = "f"

    def __init__(
        self,
        kernel: Kernel,
        decoder: nn.Module,
        likelihood: Likelihood | None = None,
        *,
        independent_dim: int = 0,
        num_data: int | None = None,
    ):
        super().__init__(kernel, decoder, likelihood, independent_dim, num_data)
        self.event_dims = {"f": ("latent", "points"), "w": ("independent",), "y": ("output",)}

    def forward(
        self,
        x: Float[Tensor, "*#series N P"],
        y: Float[Tensor, "*#series N D"] | None = None,
        idx: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "*particles N D"]:
        """Sample all sites of one series, of several series, or of a mini-batch of series or of the points of one series.

        :param x: inputs; ``[N, P]`` for inputs common to all series.
        :param y: observations, NaN where missing; None to generate.
        :param idx: indices of the mini-batch.
        """
        # Parameters are read outside all plates, since all series share those with a prior.
        prior, params = self.prior(x), self.likelihood.params()
        weight = self._require_num_data(idx) / len(idx) if idx is not None and self.shows_some_points(x, y, idx) else 1.0
        scale, series = poutine.scale(scale=weight), self.series_plate(x, y, idx)
        with scale, series:
            f = pyro.sample("f", prior)
        return self.observe(self.by_point(f), params, y, [scale, series, pyro.plate("points", x.shape[-2], dim=-1)])

    def latent_symmetry(self) -> LatentSymmetry:
        """Return the transformations of processes, and of w, under which the model is the same."""
        return self._process_symmetry({"f": -2}, "rotations" if type(self).forward is GPVAE.forward else "none")

    def prior(self, x: Float[Tensor, "*#series N P"]) -> Any:
        """Prior of the processes at inputs.

        :param x: inputs.
        """
        return GaussianProcess(self.kernel, as_inputs(x), self.kernel_params(x)).to_event(1)

    def shows_some_points(self, x: Tensor, y: Tensor | None = None, idx: Tensor | None = None) -> bool:
        """Whether the arguments are a mini-batch of the points of one series, which the model scales without a plate.

        :param x: inputs.
        :param y: data.
        :param idx: indices of a mini-batch.
        """
        return idx is not None and is_one_series(x, y)

    def by_point(self, f: Tensor) -> Tensor:
        return (f.squeeze(-3) if f.dim() > 2 else f).mT

    def sample_process(self, posterior: Trace, x: Tensor, x_new: Tensor | None, num_samples: int, joint: bool) -> Tensor:
        """Sample f ``[draws, *series, 1, Q, M]``."""
        process: Any = without_independent(posterior.nodes["f"]["fn"])
        if not isinstance(process, StructuredPosterior):
            raise TypeError(
                f"expected a guide with a process at the site f, got {type(process).__name__}, which has no values at new "
                "inputs; use StructuredGPGuide"
            )
        if joint and not isinstance(process, StateSpacePosterior):
            # Draws by Matheron's rule have the prior's jitter, which may exceed a small posterior variance; at(...) has none.
            x_new = x if x_new is None else x_new
        process = process if x_new is None else process.at(as_inputs(x_new), joint=joint)
        f = process.sample((num_samples,)) if joint else qmc_normal(num_samples, process, dim=-2)
        return f if f.dim() > 3 else f.unsqueeze(1)
