"""Gaussian-process variational autoencoders: series and fields seen through a decoder."""

from contextlib import nullcontext
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.nn import PyroModule
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from pyro_lvgp.gaussian_process import GaussianProcess
from pyro_lvgp.kernels import Kernel, as_kernel
from pyro_lvgp.likelihoods import Gaussian, Likelihood
from pyro_lvgp.models.latent_variable_model import Guide
from pyro_lvgp.models.mixture import Imputation, MixturePrediction
from pyro_lvgp.networks import as_pyro_module
from pyro_lvgp.validation import check_series


class GPVAE(PyroModule):
    r"""Independent Gaussian processes over time or space, decoded point by point; missing entries are NaN.

    .. math::

        f_k \sim GP(0, k_k), \quad k = 1 \dots Q, \qquad w_n \sim N(0, I_R), \qquad
        y_n \sim p\big(y \mid \mathrm{decoder}(f_n, w_n)\big)

    for N points of one series, or of each of B series that share kernels and decoder.  Series of different lengths are padded
    with rows of NaN.

    Sites: ``f`` [B, 1, Q, N] in plate ``series``; with ``independent_dim``, ``w`` [B, N, R] in plates ``series`` and
    ``points``; ``y`` [B, N, D], observed, in both plates; for one series, all of them without B and that plate (``f`` [Q, N]);
    and whatever has a prior by ``PyroSample``.

    :param kernel: covariance with a batch dimension over the Q latent processes, such as ``RBF(1, batch_shape=(Q,))`` or a
        :class:`~pyro_lvgp.kernels.Stack` of different ones.
    :param decoder: a module that maps latents ``[*, Q + R]`` to the functions ``[*, D]`` under the likelihood; or to a pair of
        them and the likelihood's parameter, such as a variance, for each entry.
    :param likelihood: p(y | decoder(f)); ``Gaussian()`` by default.
    :param independent_dim: number R of latent dimensions that are independent from point to point.
    :param num_data: number of series, or of points of the one series; needed with mini-batches only.
    :raises ValueError: if the data do not fit, or a mini-batch comes without ``num_data``.

    Source: eqs. 3.1 to 3.4 of the GP-VAE thesis.

    >>> from pyro_lvgp.guides import StructuredGPGuide
    >>> from pyro_lvgp.infer import StructuredELBO
    >>> from pyro_lvgp.kernels import RBF
    >>> from pyro_lvgp.networks import MLP, IndexNet
    >>> from pyro_lvgp.training import fit
    >>> model = GPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), MLP(2, 3))
    >>> guide = StructuredGPGuide(model, IndexNet(3, 2))
    >>> t, y = torch.linspace(0.0, 1.0, 20)[:, None], torch.randn(20, 3)
    >>> history = fit(model, guide, t, y, loss=StructuredELBO(), num_steps=3, progress=False)
    >>> model.predict(guide, t, y, torch.tensor([[1.1], [1.2]])).mean.shape
    torch.Size([2, 3])
    """

    gp_site = "f"
    local_plate = "series"

    def __init__(
        self,
        kernel: Kernel,
        decoder: nn.Module,
        likelihood: Likelihood | None = None,
        *,
        independent_dim: int = 0,
        num_data: int | None = None,
    ):
        super().__init__()
        if independent_dim < 0:
            raise ValueError(f"expected independent_dim of 0 or more, got {independent_dim}")
        self.kernel = as_kernel(kernel)
        self.decoder = as_pyro_module(decoder)
        self.likelihood = Gaussian() if likelihood is None else likelihood
        self.independent_dim, self.num_data = independent_dim, num_data
        self.event_dims = {"f": ("latent", "point"), "w": ("independent",), "y": ("output",)}

    def forward(
        self,
        x: Float[Tensor, "*#series N P"],
        y: Float[Tensor, "*#series N D"] | None = None,
        idx: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "*particles N D"]:
        """The generative model of one series, or of series; or of a mini-batch, of points of one or of whole series.

        :param x: inputs; one set of them can serve all series.
        :param y: observations, NaN where missing; None to generate.
        :param idx: indices of the mini-batch.
        """
        # What has a prior by PyroSample is read outside all plates: kernel, likelihood and decoder serve all series.
        prior, theta = self.prior(x), self.likelihood.theta()
        scale, series = self._mini_batch_of_points(x, y, idx), self.series_plate(x, y, idx)
        points = pyro.plate("points", x.shape[-2], dim=-1)
        with scale, series:
            f = pyro.sample("f", prior)
            latents = (f.squeeze(-3) if f.dim() > 2 else f).mT
            if self.independent_dim:
                white = dist.Normal(latents.new_zeros(self.independent_dim), 1.0).to_event(1)
                with points:
                    latents = _join(latents, pyro.sample("w", white))
        function = self.decoder(latents)
        if isinstance(function, tuple):
            function, theta = function
        entries = self.likelihood.distribution(function, theta)
        with scale, series, points:
            if y is None:
                return pyro.sample("y", entries.to_event(1))
            return pyro.sample("y", entries.mask(~torch.isnan(y)).to_event(1), obs=torch.nan_to_num(y))

    def prior(self, x: Float[Tensor, "*#series N P"]) -> Any:
        """The processes at inputs."""
        return GaussianProcess(self.kernel, _inputs(x), self.kernel.theta()).to_event(1)

    def series_plate(self, x: Tensor, y: Tensor | None = None, idx: Tensor | None = None) -> Any:
        """The plate over series, or a context that does nothing if there is one only."""
        sizes = [len(data) for data in (y, x) if data is not None and data.dim() == 3]
        if not sizes:
            return nullcontext()
        return pyro.plate("series", sizes[0] if idx is None else self._total(idx), subsample=idx, dim=-2)

    def create_plates(self, x: Tensor, y: Tensor | None = None, idx: Tensor | None = None) -> list[pyro.plate]:
        """The plates that guides open as well."""
        series = self.series_plate(x, y, idx)
        return [series] if isinstance(series, pyro.plate) else []

    def _mini_batch_of_points(self, x: Tensor, y: Tensor | None, idx: Tensor | None) -> Any:
        one_series = x.dim() == 2 and (y is None or y.dim() == 2)
        return poutine.scale(scale=self._total(idx) / len(idx)) if one_series and idx is not None else nullcontext()

    def _total(self, idx: Tensor) -> int:
        if self.num_data is None:
            raise ValueError(f"expected num_data with mini-batches, got one of {len(idx)} and none; pass num_data to GPVAE")
        return self.num_data

    def check(self, x: Float[Tensor, "*#series N P"], y: Float[Tensor, "*#series N D"]) -> None:
        """Raise if the data cannot be used: shapes, dtype, missing or infinite inputs, outputs never observed."""
        check_series(x, y)
        self.likelihood.check(y)

    def predict(
        self,
        guide: Guide,
        x: Float[Tensor, "*#series N P"],
        y: Float[Tensor, "*#series N D"],
        x_new: Float[Tensor, "*#series M P"] | None = None,
        *,
        num_samples: int = 100,
        joint: bool = False,
    ) -> MixturePrediction:
        """Predict at inputs never seen, for series never trained on, or at the inputs themselves.

        :param guide: a fitted guide.
        :param x: inputs of the data.
        :param y: data to condition on, NaN where missing.
        :param x_new: where to predict; at ``x`` if omitted.
        :param num_samples: draws of the latents.
        :param joint: draw latents jointly, as for trajectories; otherwise each point from its marginal, which is faster.
        """
        at = x if x_new is None else x_new
        mixture = []
        with torch.no_grad():
            for share in self._shares(guide, x, y, num_samples):
                posterior = dict(prune_subsample_sites(poutine.trace(guide).get_trace(x, y)).iter_stochastic_nodes())
                drawn: dict[str, Any] = {name: site["value"] for name, site in posterior.items()}
                process: Any = posterior["f"]["fn"]
                f = drawn["f"] = self._draw(process.base_dist, None if x_new is None else _inputs(at), share, joint)
                if self.independent_dim and x_new is None:
                    white: Any = posterior["w"]["fn"]
                    drawn["w"] = white.sample((share,))
                elif self.independent_dim:  # nothing is known about what is independent of all data
                    drawn["w"] = f.new_empty(*f.shape[:-3], at.shape[-2], self.independent_dim).normal_()
                rows: Any = poutine.trace(poutine.condition(self, drawn)).get_trace(at).nodes["y"]["fn"]
                mixture.append(rows.base_dist)
        return MixturePrediction(tuple(mixture))

    def impute(
        self, guide: Guide, x: Float[Tensor, "*#series N P"], y: Float[Tensor, "*#series N D"], *, num_samples: int = 100
    ) -> Imputation:
        """Fill the missing entries; observed ones are returned as they are, with variance zero.

        :param guide: a fitted guide.
        :param x: inputs of the data.
        :param y: data, NaN where missing.
        :param num_samples: draws of the latents.
        """
        predicted, missing = self.predict(guide, x, y, num_samples=num_samples), torch.isnan(y)
        return Imputation(torch.where(missing, predicted.mean, y), torch.where(missing, predicted.variance, 0.0))

    def forecast(
        self,
        guide: Guide,
        x: Float[Tensor, "*#series N 1"],
        y: Float[Tensor, "*#series N D"],
        num_steps: int,
        *,
        num_samples: int = 100,
        joint: bool = True,
    ) -> MixturePrediction:
        """Continue evenly spaced series, by draws of whole trajectories.

        :param guide: a fitted guide.
        :param x: times of the data, increasing in equal steps.
        :param y: data, NaN where missing.
        :param num_steps: how many steps to look ahead.
        :param num_samples: draws of the latents.
        :param joint: as in :meth:`predict`.
        :raises ValueError: if there is one time only or more than one input column, or the steps are not equal and positive.
        """
        step = x.diff(dim=-2)
        even = step.numel() and (step > 0.0).all() and torch.allclose(step, step[..., :1, :], rtol=1e-3)
        if x.shape[-1] != 1 or not even:
            steps = step.flatten().tolist() or [0.0]
            raise ValueError(
                f"expected two or more times of shape [..., N, 1], increasing in equal steps, got {list(x.shape)} with steps "
                f"from {min(steps):g} to {max(steps):g}; give the inputs to predict(...) yourself"
            )
        ahead = torch.arange(1, num_steps + 1, dtype=x.dtype, device=x.device)[:, None]
        x_new = x[..., -1:, :] + ahead * step[..., -1:, :]
        return self.predict(guide, x, y, x_new, num_samples=num_samples, joint=joint)

    @staticmethod
    def _draw(posterior: Any, inputs: Tensor | None, num_samples: int, joint: bool) -> Tensor:
        """Draws of f [draws, *series, 1, Q, M] at inputs laid out for the prior, or where the data are."""
        if inputs is not None:
            f = posterior.at(inputs, joint=joint).sample((num_samples,))
        else:
            expanded = posterior.expand((num_samples, *posterior.batch_shape))
            f = expanded.rsample() if joint else expanded.rsample_marginals()
        return f if f.dim() > 3 else f.unsqueeze(1)

    def _shares(self, guide: Guide, x: Tensor, y: Tensor, num_samples: int) -> list[int]:
        """How many draws of the latents to take for each draw of all else: all of them, if there is nothing else."""
        sites = prune_subsample_sites(poutine.trace(guide).get_trace(x, y)).iter_stochastic_nodes()
        return [num_samples] if {name for name, _ in sites} <= {"f", "w"} else [1] * num_samples


def _join(latents: Tensor, w: Tensor) -> Tensor:
    """[*, N, Q] and [*, N, R] as [*, N, Q + R]."""
    lead = torch.broadcast_shapes(latents.shape[:-1], w.shape[:-1])
    return torch.cat([latents.expand(*lead, -1), w.expand(*lead, -1)], -1)


def _inputs(x: Tensor) -> Tensor:
    """Inputs with dimensions of size 1 for the latents and, of several series, for the plate of the points left of them."""
    return x[:, None, None] if x.dim() == 3 else x[None]
