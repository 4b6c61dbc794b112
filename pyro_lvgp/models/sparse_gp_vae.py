"""Gaussian-process variational autoencoders through inducing points."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.distributions import constraints
from pyro.nn import PyroParam
from pyro.poutine import Trace
from torch import Tensor, nn

from pyro_lvgp.distributions.sparse_gaussian_process import SparseProcess
from pyro_lvgp.infer.elbo.handlers import MarginalizeGaussians, sample_moments
from pyro_lvgp.kernels import Kernel
from pyro_lvgp.likelihoods import Likelihood
from pyro_lvgp.models.latent_process_model import LatentProcessModel, as_inputs
from pyro_lvgp.models.latent_variable_model import check_all_given
from pyro_lvgp.networks.pyro_module import replace_parameter
from pyro_lvgp.ops.quasi_monte_carlo import qmc_normal

__all__ = ["SparseGPVAE"]


class SparseGPVAE(LatentProcessModel):
    r"""The :class:`~pyro_lvgp.models.GPVAE` with inducing points, for many points.

    .. math::

        u_k \sim N(0, I_M), \qquad f_{nk} \mid u_k \sim N\big(A_{nk}^T u_k,\; k_k(x_n, x_n) - A_{nk}^T A_{nk}\big), \qquad
        y_n \sim p\big(y \mid \mathrm{decoder}(f_n, w_n)\big)

    with :math:`A_k = L_k^{-1} k_k(Z, X)`, :math:`L_k L_k^T = k_k(Z, Z)` and whitened :math:`u_k = L_k^{-1} f_k(Z)`.  Given u,
    points are independent: bounds, which take one point at a time, are those of the process itself.  A step takes O(N M² + M³)
    time and O(N M) memory.

    Sites: ``u`` [B, Q, M] in plates ``series`` and ``latents``; ``f`` [B, N, Q] and, with ``independent_dim``, ``w`` [B, N, R]
    in plates ``series`` and ``points``; ``y`` [B, N, D], observed, in the same; for one series, all of them without B and its
    plate; and whatever has a prior by ``PyroSample``.

    :param kernel: covariance with a batch dimension over the Q latent processes, such as ``RBF(1, batch_shape=(Q,))``.
    :param decoder: as for ``GPVAE``.
    :param inducing_points: Z to start from, such as :func:`~pyro_lvgp.models.cluster_centres` of the inputs:
        ``[M, P]``, shared by all processes and series; ``[Q, M, P]``, of each process; or ``[B, 1, M, P]`` or
        ``[B, Q, M, P]``, of each series as well.
    :param likelihood: p(y | decoder(f)); ``Gaussian()`` by default.
    :param independent_dim: number R of latent dimensions that are independent from point to point.
    :param num_data: number of series, or of points of the one series; needed with mini-batches only.
    :param held_out: share of a mini-batch of points of one series, which must be in random order, that the encoder does not
        see: the last ones.  In q(u) the points it sees stand for all; in the likelihood they count once, and those held out
        stand for all the rest.  This estimates, without bias, the bound under a q(u) made of a part of the data.  With 0 all
        points are encoded and scored, and the estimate is too high.
    :param jitter: added to the diagonal of k(Z, Z), in units of its mean.
    :raises ValueError: if data or inducing points do not fit, or a mini-batch comes without ``num_data``, or is too small to
        be divided.

    Source: section 3.4 of the GP-VAE thesis; Ashman et al. (2020), "Sparse Gaussian process variational autoencoders".

    >>> import torch
    >>> from pyro_lvgp.guides import SparseStructuredGPGuide
    >>> from pyro_lvgp.infer import MeanFieldELBO
    >>> from pyro_lvgp.models import cluster_centres
    >>> from pyro_lvgp.kernels import RBF
    >>> from pyro_lvgp.networks import MLP, IndexNet
    >>> from pyro_lvgp.infer import fit
    >>> t, y = torch.linspace(0.0, 1.0, 200)[:, None], torch.randn(200, 3)
    >>> model = SparseGPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), MLP(2, 3), cluster_centres(t, 10))
    >>> guide = SparseStructuredGPGuide(model, encoders={"u": IndexNet(3, 2)})
    >>> history = fit(model, guide, t, y, loss=MeanFieldELBO("points"), num_steps=3, progress=False)
    >>> model.predict(guide, t, y, torch.tensor([[1.1], [1.2]])).mean.shape
    torch.Size([2, 3])
    """

    gp_site = "u"
    conditional_site = "f"
    _processes: ClassVar[frozenset[str]] = frozenset({"u", "f", "w"})

    def __init__(
        self,
        kernel: Kernel,
        decoder: nn.Module,
        inducing_points: Float[Tensor, "*Z M P"],
        likelihood: Likelihood | None = None,
        *,
        independent_dim: int = 0,
        num_data: int | None = None,
        held_out: float = 0.0,
        jitter: float = 1e-5,
    ):
        if not 2 <= inducing_points.dim() <= 4:
            raise ValueError(
                "expected inducing_points [points, columns], [latents, points, columns] or [series, latents, points, columns],"
                f" got {list(inducing_points.shape)}; a single column needs [:, None]"
            )
        if not (inducing_points.is_floating_point() and inducing_points.numel() and inducing_points.isfinite().all()):
            raise ValueError(
                "expected one or more inducing points, finite and of a floating-point dtype, got "
                f"{list(inducing_points.shape)} of {inducing_points.dtype}; drop NaN and infinity, and take whole numbers "
                ".to(torch.get_default_dtype())"
            )
        if not 0.0 <= held_out < 1.0:
            raise ValueError(f"expected held_out from 0 to below 1, got {held_out}; it is a share of a mini-batch")
        if not jitter >= 0.0:
            raise ValueError(f"expected jitter of 0 or more, got {jitter}")
        super().__init__(kernel, decoder, likelihood, independent_dim, num_data)
        latents, of_latents = self.kernel.batch_shape[-1:], inducing_points.shape[:-2][-1:]
        if latents and of_latents and 1 not in (*latents, *of_latents) and latents != of_latents:
            raise ValueError(
                f"expected inducing points of the kernel's {latents[0]} latent processes, got those of {of_latents[0]} in "
                f"{list(inducing_points.shape)}; those of series are [series, 1, points, columns]"
            )
        self.inducing_points: Any = PyroParam(inducing_points.clone(), constraints.real)
        self.held_out, self.jitter = held_out, jitter
        self.event_dims = {"u": ("inducing",), "f": ("latent",), "w": ("independent",), "y": ("output",)}

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
        process, params = self.process(x, y, idx), self.likelihood.params()
        series, points = self.series_plate(x, y, idx), self.points_plate(x, y, idx)
        prior = process.prior()
        with series, pyro.plate("latents", prior.batch_shape[-2], dim=-1):
            u = sample_moments("u", prior.to_event(1), infer={"covariance": "full"})
        mean, variance = process.marginals(*u)
        with series, points:
            f = pyro.sample("f", dist.Normal(mean.mT, variance.sqrt().mT).to_event(1))
        return self.observe(f, params, y, [series, points, self._scale(x, y, idx)])

    def process(
        self, x: Float[Tensor, "*#series N P"], y: Tensor | None = None, idx: Int[Tensor, " batch"] | None = None
    ) -> SparseProcess:
        """The processes at inputs.

        :param x: inputs.
        :param y: the data, for their shape.
        :param idx: indices of the mini-batch.
        """
        Z = self.inducing_points
        if Z.dim() == 4:
            Z = (Z if idx is None else Z[idx]).unsqueeze(1)
            _check_series(Z, x, y)
        weight: float | Tensor = 1.0
        if idx is not None and _is_one_series(x, y):
            num_encoded = self._num_encoded(idx)
            weight = self._total(idx) / num_encoded
            if num_encoded < len(idx):
                weight = torch.cat([x.new_full((num_encoded,), weight), x.new_zeros(len(idx) - num_encoded)])
        return SparseProcess(self.kernel, Z, as_inputs(x), self.kernel_params(x), jitter=self.jitter, weight=weight)

    def _num_encoded(self, idx: Tensor) -> int:
        """How many points of a mini-batch q(u) is made of, the first ones."""
        num_encoded = round((1.0 - self.held_out) * len(idx))
        if not num_encoded or (self.held_out and num_encoded == len(idx)):
            raise ValueError(
                f"expected mini-batches of points to hold out {self.held_out} of, not all, got {len(idx)} points; take more"
            )
        return num_encoded

    def _scale(self, x: Tensor, y: Tensor | None, idx: Tensor | None) -> AbstractContextManager[Any]:
        """Within the plate: a point that q(u) is made of counts once, those held out stand for all others."""
        if not self.held_out or idx is None or not _is_one_series(x, y):
            return nullcontext()
        num_encoded, total = self._num_encoded(idx), self._total(idx)
        num_scored = len(idx) - num_encoded
        counts = torch.cat([x.new_ones(num_encoded), x.new_full((num_scored,), (total - num_encoded) / num_scored)])
        return poutine.scale(scale=counts * (len(idx) / total))

    def points_plate(self, x: Tensor, y: Tensor | None = None, idx: Tensor | None = None) -> pyro.plate:
        """The plate over points, of which a mini-batch of one series shows some.

        :param x: inputs.
        :param y: data.
        :param idx: which points of the one series these are, or which series; None for all.
        """
        if idx is None or not _is_one_series(x, y):
            return pyro.plate("points", x.shape[-2], dim=-1)
        return pyro.plate("points", self._total(idx), subsample=idx, dim=-1)

    def create_plates(self, x: Tensor, y: Tensor | None = None, idx: Tensor | None = None) -> list[pyro.plate]:
        return [*super().create_plates(x, y, idx), self.points_plate(x, y, idx)]

    def place_inducing_points(self, inducing_points: Float[Tensor, "*Z M P"]) -> None:
        """Replace the parameter ``inducing_points``; gradients reach the new one if they reached the old.

        :param inducing_points: new inducing points, of which there may be another number.
        """
        replace_parameter(self, "inducing_points", inducing_points)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args) -> None:
        # There may be more inducing points by then, or fewer, if a guide has taken in a stream.
        stored, now = state_dict.get(f"{prefix}inducing_points_unconstrained"), self.inducing_points
        if stored is not None and stored.shape[-2] != now.shape[-2] and stored.shape[-1] == now.shape[-1]:
            self.place_inducing_points(stored)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def by_point(self, f: Tensor) -> Tensor:
        return f

    def sample_process(self, posterior: Trace, x: Tensor, x_new: Tensor | None, num_samples: int, joint: bool) -> Tensor:
        """Draws of f [draws, *series, N, Q]."""
        drawn: dict[str, Any] = {name: site["value"] for name, site in posterior.iter_stochastic_nodes()}
        shared: Any = {name: value for name, value in drawn.items() if name not in ("f", "w")}
        u: Any = posterior.nodes["u"]["fn"]
        if joint:
            shared["u"] = u.sample((num_samples,))
        with nullcontext() if joint else MarginalizeGaussians(posterior):
            trace = poutine.trace(poutine.condition(self, shared)).get_trace(x if x_new is None else x_new)
        check_all_given(trace, {"f", "w", *shared})
        prior: Any = trace.nodes["u"]["fn"]
        f: Any = trace.nodes["f"]["fn"]
        return prior.base_dist.process.trajectories(shared["u"]).mT if joint else qmc_normal(num_samples, f)


def _check_series(Z: Tensor, x: Tensor, y: Tensor | None) -> None:
    """Raise if inducing points of each series are those of other series than inputs and data."""
    num_series = next((len(part) for part in (y, x) if part is not None and part.dim() == 3), len(Z) if y is None else 1)
    if len(Z) not in (1, num_series):
        raise ValueError(
            f"expected inducing points of the {num_series} series of the data, got those of {len(Z)}; one set of them for all "
            "series has no such dimension"
        )


def _is_one_series(x: Tensor, y: Tensor | None) -> bool:
    return x.dim() == 2 and (y is None or y.dim() == 2)
