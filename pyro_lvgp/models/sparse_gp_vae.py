"""Gaussian-process variational autoencoder with inducing points."""

from collections.abc import Sequence
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
from pyro_lvgp.infer.protocols import LatentSymmetry
from pyro_lvgp.kernels import Kernel
from pyro_lvgp.kernels._symmetry import SymmetryGroup
from pyro_lvgp.likelihoods import Likelihood
from pyro_lvgp.models._given_latents import check_all_given
from pyro_lvgp.models.latent_process_model import LatentProcessModel, as_inputs, is_one_series
from pyro_lvgp.networks.pyro_module import replace_parameter
from pyro_lvgp.ops.quasi_monte_carlo import qmc_normal

__all__ = ["SparseGPVAE"]


class SparseGPVAE(LatentProcessModel):
    r""":class:`~pyro_lvgp.models.GPVAE` with inducing points, for series and fields of many points.

    .. math::

        u_k \sim N(0, I_M), \qquad f_{nk} \mid u_k \sim N\big(A_{nk}^T u_k,\; k_k(x_n, x_n) - A_{nk}^T A_{nk}\big), \qquad
        y_n \sim p\big(y \mid \mathrm{decoder}(f_n, w_n)\big)

    with :math:`A_k = L_k^{-1} k_k(Z, X)`, :math:`L_k L_k^T = k_k(Z, Z)` and whitened :math:`u_k = L_k^{-1} f_k(Z)`.  Given u,
    points are independent.  This does not change the bounds, which depend on the marginals of single points alone.  A step
    takes O(N M² + M³) time and O(N M) memory.

    Sites: ``u`` [B, Q, M] in plates ``series`` and ``latents``; ``f`` [B, N, Q] and, with ``independent_dim``, ``w`` [B, N, R]
    in plates ``series`` and ``points``; ``y`` [B, N, D], observed, in the same plates; and parameters with a ``PyroSample``
    prior.  For one series the sites are without the dimension B and the plate ``series``.

    :param kernel: covariance with a batch dimension over the Q latent processes, such as ``RBF(1, batch_shape=(Q,))``.
    :param decoder: as for ``GPVAE``.
    :param inducing_points: initial Z, such as :func:`~pyro_lvgp.models.cluster_centres` of the inputs: ``[M, P]`` for
        points shared by all processes and series; ``[Q, M, P]`` for those of each process; ``[B, 1, M, P]`` for those of each
        series; or ``[B, Q, M, P]`` for those of each series and process.  Columns that the kernel reads as levels of
        categories (:attr:`~pyro_lvgp.kernels.Kernel.level_columns`) have no gradient, so that levels stay as they are; take
        the points from the rows of the data, as centres of clusters are between levels.
    :param likelihood: p(y | decoder(f)); ``Gaussian()`` by default.
    :param independent_dim: number R of latent dimensions that are independent from point to point.
    :param num_data: number of series, or of points of the one series; needed with mini-batches only.
    :param held_out: share of a mini-batch of points of one series that is not encoded, which is taken from the end of the
        mini-batch; the points must be in random order.  In q(u) the encoded points represent all data.  In the likelihood the
        encoded points have weight 1, and the others represent all further data.  This is an unbiased estimate of the bound
        under a q(u) computed from a part of the data.  With 0 all points are encoded and scored, and the estimate is too high.
    :param jitter: jitter on the diagonal of k(Z, Z), relative to its mean.
    :raises ValueError: if data or inducing points do not fit, a level of an inducing point is not an integer, or a mini-batch
        comes without ``num_data``, or is too small to be divided.

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
    process_sites: ClassVar[frozenset[str]] = frozenset({"u", "f", "w"})

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
                f"{list(inducing_points.shape)} of {inducing_points.dtype}; drop NaN and infinity, and convert integers by "
                ".to(torch.get_default_dtype())"
            )
        if not 0.0 <= held_out < 1.0:
            raise ValueError(f"expected held_out from 0 to below 1, got {held_out}; pass it as a share of a mini-batch")
        if not jitter >= 0.0:
            raise ValueError(f"expected jitter of 0 or more, got {jitter}")
        super().__init__(kernel, decoder, likelihood, independent_dim, num_data)
        latents, of_latents = self.kernel.batch_shape[-1:], inducing_points.shape[:-2][-1:]
        if latents and of_latents and 1 not in (*latents, *of_latents) and latents != of_latents:
            raise ValueError(
                f"expected inducing points of the kernel's {latents[0]} latent processes, got those of {of_latents[0]} in "
                f"{list(inducing_points.shape)}; those of series are [series, 1, points, columns]"
            )
        _check_levels(inducing_points, self.kernel.level_columns)
        self.inducing_points: Any = PyroParam(inducing_points.clone(), constraints.real)
        self.held_out, self.jitter = held_out, jitter
        self.event_dims = {"u": ("inducing",), "f": ("latent",), "w": ("independent",), "y": ("output",)}

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
        process, params = self.process(x, y, idx), self.likelihood.params()
        series, points = self.series_plate(x, y, idx), self.points_plate(x, y, idx)
        prior = process.prior()
        with series, pyro.plate("latents", prior.batch_shape[-2], dim=-1):
            u = sample_moments("u", prior.to_event(1), infer={"covariance": "full"})
        mean, variance = process.marginals(*u)
        with series, points:
            f = pyro.sample("f", dist.Normal(mean.mT, variance.sqrt().mT).to_event(1))
        return self.observe(f, params, y, [series, points, self._scale(x, y, idx)])

    def latent_symmetry(self) -> LatentSymmetry:
        """Return the transformations of processes, and of w, under which the model is the same.

        Processes with inducing points of their own have no rotations, and permutations if the points are learned.
        """
        group: SymmetryGroup = "rotations"
        if self.inducing_points.dim() > 2 and self.inducing_points.shape[-3] > 1:
            group = "signed permutations" if self.inducing_points_unconstrained.requires_grad else "signs"
        if type(self).forward is not SparseGPVAE.forward:
            group = "none"
        return self._process_symmetry({"f": -1, "u": -2}, group)

    def process(
        self, x: Float[Tensor, "*#series N P"], y: Tensor | None = None, idx: Int[Tensor, " batch"] | None = None
    ) -> SparseProcess:
        """Sparse processes at inputs.

        :param x: inputs.
        :param y: data, of which only the shape is used.
        :param idx: indices of the mini-batch.
        """
        Z = _without_gradient(self.inducing_points, self.kernel.level_columns)
        if Z.dim() == 4:
            Z = (Z if idx is None else Z[idx]).unsqueeze(1)
            _check_series(Z, x, y)
        weight: float | Tensor = 1.0
        if idx is not None and is_one_series(x, y):
            num_encoded = self._num_encoded(idx)
            weight = self._require_num_data(idx) / num_encoded
            if num_encoded < len(idx):
                weight = torch.cat([x.new_full((num_encoded,), weight), x.new_zeros(len(idx) - num_encoded)])
        return SparseProcess(self.kernel, Z, as_inputs(x), self.kernel_params(x), jitter=self.jitter, weight=weight)

    def _num_encoded(self, idx: Tensor) -> int:
        """Number of points at the start of a mini-batch from which q(u) is computed."""
        num_encoded = round((1.0 - self.held_out) * len(idx))
        if not num_encoded or (self.held_out and num_encoded == len(idx)):
            raise ValueError(
                f"expected mini-batches large enough to hold out a share of {self.held_out}, got {len(idx)} points; use a "
                "larger batch_size"
            )
        return num_encoded

    def _scale(self, x: Tensor, y: Tensor | None, idx: Tensor | None) -> AbstractContextManager[Any]:
        """Scales of points within the plate: encoded points have weight 1, and held-out points represent all others."""
        if not self.held_out or idx is None or not is_one_series(x, y):
            return nullcontext()
        num_encoded, total = self._num_encoded(idx), self._require_num_data(idx)
        num_scored = len(idx) - num_encoded
        counts = torch.cat([x.new_ones(num_encoded), x.new_full((num_scored,), (total - num_encoded) / num_scored)])
        return poutine.scale(scale=counts * (len(idx) / total))

    def points_plate(self, x: Tensor, y: Tensor | None = None, idx: Tensor | None = None) -> pyro.plate:
        """Create the plate over points, which is subsampled for a mini-batch of the points of one series.

        :param x: inputs.
        :param y: data.
        :param idx: indices of the points of the one series, or of the series; None for all.
        """
        if idx is None or not is_one_series(x, y):
            return pyro.plate("points", x.shape[-2], dim=-1)
        return pyro.plate("points", self._require_num_data(idx), subsample=idx, dim=-1)

    def create_plates(self, x: Tensor, y: Tensor | None = None, idx: Tensor | None = None) -> list[pyro.plate]:
        return [*super().create_plates(x, y, idx), self.points_plate(x, y, idx)]

    def place_inducing_points(self, inducing_points: Float[Tensor, "*Z M P"]) -> None:
        """Replace the parameter ``inducing_points``; the new parameter requires gradients if the old one did.

        :param inducing_points: new inducing points, whose number M may differ.
        """
        replace_parameter(self, "inducing_points", inducing_points)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args) -> None:
        # A guide that was fitted to a stream may have changed the number of inducing points before the state was stored.
        stored, current = state_dict.get(f"{prefix}inducing_points_unconstrained"), self.inducing_points
        if stored is not None and stored.shape[-2] != current.shape[-2] and stored.shape[-1] == current.shape[-1]:
            self.place_inducing_points(stored)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def by_point(self, f: Tensor) -> Tensor:
        return f

    def sample_process(self, posterior: Trace, x: Tensor, x_new: Tensor | None, num_samples: int, joint: bool) -> Tensor:
        """Sample f ``[draws, *series, N, Q]``."""
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


def _check_levels(Z: Tensor, columns: Sequence[int]) -> None:
    """Raise if columns of the inducing points that are levels of categories have numbers that are no integers."""
    for column in columns:
        if column < Z.shape[-1] and not (Z[..., column] == Z[..., column].round()).all():
            raise ValueError(
                f"expected integer levels in column {column} of the inducing points, which the kernel reads as levels of a "
                "category, got other numbers; take inducing points from the rows of the data, such as x[::10]"
            )


def _without_gradient(Z: Tensor, columns: Sequence[int]) -> Tensor:
    """Return inducing points of which some columns have no gradient."""
    if not columns:
        return Z
    return torch.stack([part.detach() if i in columns else part for i, part in enumerate(Z.unbind(-1))], -1)


def _check_series(Z: Tensor, x: Tensor, y: Tensor | None) -> None:
    """Raise if inducing points for each series are not for as many series as there are in inputs and data."""
    num_series = next((len(part) for part in (y, x) if part is not None and part.dim() == 3), len(Z) if y is None else 1)
    if len(Z) not in (1, num_series):
        raise ValueError(
            f"expected inducing points of the {num_series} series of the data, got those of {len(Z)} series; leave out the "
            "dimension of the series for points shared by all"
        )
