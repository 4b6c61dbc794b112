"""Base class of models of series and fields with a decoder: plates, predictions, imputations and forecasts."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro import poutine
from pyro.poutine import Trace
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from pyro_lvgp._utils.abstract import AbstractModuleMeta
from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.eval_mode import eval_mode
from pyro_lvgp._utils.progress import progress_bar
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.unique_names import UniquelyNamed
from pyro_lvgp._utils.validation import (
    check_inputs,
    check_new_inputs,
    check_not_empty,
    check_series,
    check_sizes,
    check_tensors,
)
from pyro_lvgp.infer.protocols import LatentSymmetry
from pyro_lvgp.kernels import Kernel, as_kernel
from pyro_lvgp.kernels._symmetry import KernelSymmetry, SymmetryGroup, intersection, symmetry_of_processes
from pyro_lvgp.kernels.base import KernelParams
from pyro_lvgp.kernels.composition import Combination
from pyro_lvgp.likelihoods import Likelihood, as_likelihood
from pyro_lvgp.likelihoods.rows import check_independent_entries
from pyro_lvgp.models._decoded_rows import DecodedRows
from pyro_lvgp.models._given_latents import check_all_given
from pyro_lvgp.models._latent_rows import Guide
from pyro_lvgp.models._own_sites import OwnSites
from pyro_lvgp.models.prediction import Prediction
from pyro_lvgp.networks import MLP
from pyro_lvgp.networks.pyro_module import adopt
from pyro_lvgp.ops.quasi_monte_carlo import qmc_normal

__all__ = ["LatentProcessModel", "as_inputs", "is_one_series"]


class LatentProcessModel(UniquelyNamed, OwnSites, metaclass=AbstractModuleMeta):
    """Base class of models with latent processes ``f`` over inputs, and a decoder that maps f to y at each point.

    A subclass implements ``forward(x, y, idx)``, which samples f and returns the result of :meth:`observe`; :meth:`by_point`;
    and :meth:`sample_process`.  The class implements plates, checks, predictions, imputations and forecasts.  Predictions run
    model and guide in evaluation mode: dropout is off, and batches are normalised by running statistics.

    :param kernel: covariance with a batch dimension over the latent processes.
    :param decoder: a module that maps latents to the function values under the likelihood, or to a pair of function values and
        the parameter of the likelihood.
    :param likelihood: p(y | decoder(f)); ``Gaussian()`` by default.
    :param independent_dim: number of latent dimensions that are independent from point to point.
    :param num_data: number of series, or of points of the one series; needed with mini-batches only.
    :raises ValueError: for a negative ``independent_dim``, or a decoder that is already a part of another model.
    :raises TypeError: for a likelihood whose entries of a row are dependent.

    >>> from pyro_lvgp.guides import StructuredGPGuide
    >>> from pyro_lvgp.kernels import RBF
    >>> from pyro_lvgp.models import GPVAE
    >>> from pyro_lvgp.networks import MLP, IndexNet
    >>> model = GPVAE(RBF(1, lengthscale=0.2, batch_shape=(2,)), MLP(2, 3))
    >>> guide = StructuredGPGuide(model, encoders={"f": IndexNet(3, 2)})
    >>> t, y = torch.linspace(0.0, 1.0, 20)[:, None], torch.randn(20, 3)
    >>> y[5:, 0] = torch.nan
    >>> filled, ahead = model.impute(guide, t, y), model.forecast(guide, t, y, horizon=4)
    >>> filled.mean.shape, ahead.mean.shape
    (torch.Size([20, 3]), torch.Size([4, 3]))
    """

    local_plate = "series"
    process_sites: ClassVar[frozenset[str]] = frozenset({"f", "w"})
    """Sites of which :meth:`predict` takes many draws for one draw of all other sites; a subclass may add sites."""
    input_dims: ClassVar[Mapping[str, Sequence[str]]] = {"x": ("series", "points", "input")}

    def __init__(
        self, kernel: Kernel, decoder: nn.Module, likelihood: Likelihood | None, independent_dim: int, num_data: int | None
    ):
        super().__init__()
        if independent_dim < 0:
            raise ValueError(f"expected independent_dim of 0 or more, got {independent_dim}")
        self.kernel = as_kernel(kernel)
        adopt(self, "decoder", decoder)
        self.likelihood = as_likelihood(likelihood)
        check_independent_entries(self.likelihood, type(self).__name__)
        self.independent_dim, self.num_data = independent_dim, num_data

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor | None = None, idx: Tensor | None = None) -> Tensor:
        """Sample the site f, and y by :meth:`observe`.

        :param x: inputs.
        :param y: observations, NaN where missing; None to generate.
        :param idx: indices of a mini-batch, of series or of the points of one series; None for all.
        """

    @abstractmethod
    def by_point(self, f: Tensor) -> Tensor:
        """Rearrange the value of the site f to latents of each point.

        :param f: value of the site.
        :returns: latents ``[*, N, Q]``.
        """

    @abstractmethod
    def sample_process(self, posterior: Trace, x: Tensor, x_new: Tensor | None, num_samples: int, joint: bool) -> Tensor:
        """Sample the site f from the posterior of a guide.

        :param posterior: trace of the guide given the data.
        :param x: inputs of the data.
        :param x_new: inputs at which to sample; None for the inputs of the data.
        :param num_samples: number of draws.
        :param joint: sample all points jointly; False samples each point from its marginal distribution.
        :returns: draws along a new first dimension.
        """

    def observe(
        self, latents: Tensor, params: Tensor | None, y: Tensor | None, contexts: Sequence[AbstractContextManager[Any]]
    ) -> Tensor:
        """Sample the independent latents w if there are any, decode all latents, and sample or observe y.

        :param latents: f at each point, ``[*, N, Q]``.
        :param params: parameter of the likelihood.
        :param y: observations, NaN where missing; None to generate.
        :param contexts: plates and scales over series and points.
        :returns: the value of the site y.
        :raises ValueError: if the decoder does not fit the data or the likelihood.
        """
        if self.independent_dim:
            prior = dist.Normal(latents.new_zeros(self.independent_dim), 1.0).to_event(1)
            with _enter_all(contexts):
                latents = _join(latents, pyro.sample("w", prior))
        function, params = self._decode(latents, params, None if y is None else y.shape[-1])
        entries = self.likelihood.distribution(function, params)
        with _enter_all(contexts):
            if y is None:
                return pyro.sample("y", DecodedRows(entries, function))
            value = torch.nan_to_num(y, self.likelihood.fill_value)
            return pyro.sample("y", entries.mask(~torch.isnan(y)).to_event(1), obs=value)

    def _decode(self, latents: Tensor, params: Tensor | None, data_dim: int | None) -> tuple[Tensor, Tensor | None]:
        """Function values of each output, and the parameter of the likelihood, which the decoder may return as well."""
        try:
            function = self.decoder(latents)
        except RuntimeError as error:
            error.add_note(f"the decoder was given {latents.shape[-1]} latent dimensions, and numbers of {latents.dtype}")
            raise
        if isinstance(function, tuple | list):
            if params is None:
                raise ValueError(
                    f"expected a decoder that returns functions alone, as {type(self.likelihood).__name__} has no parameter, "
                    "got a pair; take another likelihood"
                )
            function, params = function
        if data_dim not in (None, function.shape[-1]):
            raise ValueError(
                f"expected data of {function.shape[-1]} outputs, as many as the decoder has, got {data_dim}; change the "
                "outputs of the decoder"
            )
        self.likelihood.check_outputs(function.shape[-1], params)
        return function, params

    def log_prob_of_points(self, latents: Mapping[str, Tensor], *args: Any) -> Float[Tensor, "draws *series N"]:
        """Compute the log likelihood of the observed entries of each point, without the scale of mini-batches.

        :param latents: values of all latent sites.  Draws of a site are along a new first dimension left of all plates, with
            dimensions of size 1 between it and the plates of the site.
        :param args: arguments of the model.
        """
        trace = poutine.trace(poutine.condition(self, dict(latents))).get_trace(*args)
        rows: Any = trace.nodes["y"]
        return rows["fn"].log_prob(rows["value"])

    def _process_symmetry(self, vectors: Mapping[str, int], allowed: SymmetryGroup) -> LatentSymmetry:
        """Return the transformations of the processes, and of w, under which the model is the same.

        Linear transformations of latents change the first layer of a decoder alone, which is learned.  There are none unless
        the decoder is an :class:`~pyro_lvgp.networks.MLP` with a learned first layer.  The distribution of w at each point,
        N(0, I), is invariant under rotations.

        :param vectors: sites of the processes, with the axis of the processes.
        :param allowed: transformations that the sites allow.
        """
        is_free = isinstance(self.decoder, MLP) and all(part.requires_grad for part in self.decoder[0].parameters())
        if not is_free or allowed == "none":
            return LatentSymmetry("none", vectors)
        group, scales = intersection([symmetry_of_processes(self.kernel), KernelSymmetry(allowed, {})])
        further = (LatentSymmetry("rotations", {"w": -1}),) if self.independent_dim else ()
        return LatentSymmetry(group, vectors, scales, further)

    def kernel_params(self, x: Float[Tensor, "*#series N P"]) -> KernelParams:
        """Read the parameters of the kernel, once for each run of the model.

        :param x: inputs.
        :raises ValueError: for several draws of the parameters, if the kernel has no batch dimension for the processes.
        """
        params = self.kernel.params()
        _check_draws(self.kernel, params, x.reshape(-1, x.shape[-1])[:1])
        return params

    def series_plate(self, x: Tensor, y: Tensor | None = None, idx: Tensor | None = None) -> Any:
        """Create the plate over series, or a null context for one series.

        :param x: inputs.
        :param y: data.
        :param idx: indices of the series; None for all.
        :raises ValueError: for a mini-batch, if the model has no ``num_data``.
        """
        given = {name: data for name, data in (("y", y), ("x", x)) if data is not None}
        for name, data in given.items():
            check_not_empty(data, name)
        sizes = [len(data) for data in given.values() if data.dim() == 3]
        if not sizes:
            return nullcontext()
        return pyro.plate("series", sizes[0] if idx is None else self._require_num_data(idx), subsample=idx, dim=-2)

    def create_plates(self, x: Tensor, y: Tensor | None = None, idx: Tensor | None = None) -> list[pyro.plate]:
        """Create the plates for guides.

        :param x: inputs.
        :param y: data.
        :param idx: indices of the series, or of the points of the one series; None for all.
        """
        series = self.series_plate(x, y, idx)
        return [series] if isinstance(series, pyro.plate) else []

    def mini_batch(self, idx: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Select a mini-batch, of series or of the points of the one series, for :func:`~pyro_lvgp.infer.fit`.

        :param idx: indices of the series or points.
        :param x: all inputs; inputs that are common to all series are returned whole.
        :param y: all data.
        :returns: the arguments ``x, y, idx`` of the model.
        :raises ValueError: if ``num_data`` is not the number of series or points in ``y``.
        """
        if self.num_data not in (None, len(y)):
            raise ValueError(
                f"expected num_data={len(y)}, the number of {'points' if y.dim() == 2 else 'series'} to take mini-batches of, "
                f"got {self.num_data}; pass num_data={len(y)} to {type(self).__name__}"
            )
        return x if x.dim() < y.dim() else x[idx], y[idx], idx

    def _require_num_data(self, idx: Tensor) -> int:
        """Return ``num_data``, which mini-batches need; raise if it is None."""
        if self.num_data is None:
            raise ValueError(
                f"expected num_data with mini-batches, got a mini-batch of {len(idx)} and num_data=None; pass num_data to "
                f"{type(self).__name__}"
            )
        return self.num_data

    def example_arguments(self, shapes: Sequence[Sequence[int] | None]) -> tuple[Tensor | None, ...]:
        """Return inputs in equal steps, data at the ``fill_value`` of the likelihood, and indices, of given shapes.

        Levels of categories are zero.

        :param shapes: shapes of x, y and idx.
        """
        x, y, *idx = shapes
        like = next(self.parameters())
        inputs = torch.linspace(0.0, 1.0, x[-2])[:, None].repeat(*x[:-2], 1, x[-1]).to(like) if x is not None else None
        if inputs is not None:
            inputs[..., list(self.kernel.level_columns)] = 0.0
        data = None if y is None else torch.full(tuple(y), float(self.likelihood.fill_value)).to(like)
        return (inputs, data, *(None if size is None else torch.arange(*size, device=like.device) for size in idx))

    def check(self, x: Float[Tensor, "*#series N P"], y: Float[Tensor, "*#series N D"]) -> None:
        """Raise if the data cannot be used.

        :param x: inputs.
        :param y: data, NaN where missing.
        :raises ValueError: for other shapes, inputs that are NaN or infinite, outputs without an observation, or data outside
            the support of the likelihood.
        :raises TypeError: for data of another dtype than the model's.
        """
        check_series(x, y)
        self._check_dtype(y)
        self.likelihood.check(y)
        self.likelihood.bound_noise(y.reshape(-1, y.shape[-1]))

    def _check_dtype(self, y: Tensor) -> None:
        like = next(self.parameters(), y)
        if y.dtype != like.dtype:
            raise TypeError(
                f"expected data of the model's dtype {like.dtype}, got {y.dtype}; use .to({like.dtype}) on inputs and data, "
                f"or .to({y.dtype}) on model and guide"
            )

    @names_types
    @pyro_lock
    def predict(
        self,
        guide: Guide,
        x: Float[Tensor, "*#series N P"],
        y: Float[Tensor, "*#series N D"],
        x_new: Float[Tensor, "*#series M P"] | None = None,
        *,
        num_samples: int = 100,
        joint: bool = False,
        seed: int | None = None,
    ) -> Prediction:
        """Predict y at new inputs or at the inputs of the data, for training series or new series.

        :param guide: a fitted guide.
        :param x: inputs of the data.
        :param y: data to condition on, NaN where missing.
        :param x_new: inputs at which to predict; ``x`` by default.
        :param num_samples: number of draws of the latents.
        :param joint: draw the latents of all points jointly, as trajectories, by a factorisation of their covariance; False
            draws those of each point from their marginal distribution, which is faster.
        :param seed: seed of the draws, which then do not change the global random state; None draws from the global state.
        :raises ValueError: if ``num_samples`` is not positive, inputs do not fit or are not finite, or the guide lacks a
            latent site.
        :raises TypeError: if inputs or data have another dtype than the model.
        """
        check_sizes(num_samples=num_samples)
        check_inputs(x, y)
        self._check_dtype(y)
        inputs = x if x_new is None else x_new
        check_new_inputs(inputs, x, y)
        parts, functions = [], []
        with torch.no_grad(), eval_mode(self, guide), seeded(seed):
            for posterior, num_draws in self._posteriors(guide, x, y, num_samples):
                drawn: dict[str, Any] = {name: site["value"] for name, site in posterior.iter_stochastic_nodes()}
                f = drawn["f"] = self.sample_process(posterior, x, x_new, num_draws, joint)
                if self.independent_dim:
                    shape = (*self.by_point(f).shape[1:-1], self.independent_dim)
                    # w is independent between points, so that its posterior at new inputs is its prior.
                    w: Any = posterior.nodes["w"]["fn"] if x_new is None else dist.Normal(f.new_zeros(shape), 1.0)
                    drawn["w"] = qmc_normal(num_draws, w)
                trace = poutine.trace(poutine.condition(self, drawn)).get_trace(inputs)
                check_all_given(trace, drawn)
                rows: Any = trace.nodes["y"]["fn"]
                parts.append(rows.base_dist)
                functions.append(rows.f)
        return Prediction(
            parts,
            functions=functions,
            fill_value=self.likelihood.fill_value,
            dims=("series", "points", "output")[1 - len(parts[0].batch_shape) :],
            coords={"x": (("series", "points", "input")[-inputs.dim() :], inputs)},
        )

    @names_types
    @pyro_lock
    def impute(
        self,
        guide: Guide,
        x: Float[Tensor, "*#series N P"],
        y: Float[Tensor, "*#series N D"],
        *,
        num_samples: int = 100,
        seed: int | None = None,
    ) -> Prediction:
        """Predict the missing entries; observed entries have their observed value as mean, and variance zero.

        See :meth:`Prediction.with_observed`.

        :param guide: a fitted guide.
        :param x: inputs of the data.
        :param y: data, NaN where missing.
        :param num_samples: draws of the latents.
        :param seed: as in :meth:`predict`.
        """
        return self.predict(guide, x, y, num_samples=num_samples, seed=seed).with_observed(y)

    @names_types
    @pyro_lock
    def forecast(
        self,
        guide: Guide,
        x: Float[Tensor, "*#series N 1"],
        y: Float[Tensor, "*#series N D"],
        horizon: int,
        *,
        num_samples: int = 100,
        joint: bool = True,
        seed: int | None = None,
    ) -> Prediction:
        """Predict evenly spaced series at the times that follow the last, by draws of whole trajectories.

        The forecast of a series that is padded to the length of others starts after the padding.  :meth:`predict` without
        ``x_new`` predicts the padded rows themselves.

        :param guide: a fitted guide.
        :param x: times of the data, increasing in equal steps.
        :param y: data, NaN where missing.
        :param horizon: number of steps after the last time.
        :param num_samples: draws of the latents.
        :param joint: as in :meth:`predict`.
        :param seed: as in :meth:`predict`.
        :raises ValueError: if there are fewer than two times, several input columns, or steps that are not equal and positive.
        :raises TypeError: as :meth:`predict`.
        """
        check_sizes(horizon=horizon)
        check_inputs(x, y)
        step = _mean_step(x)
        if x.shape[-1] != 1 or step is None:
            steps = x.diff(dim=-2).flatten().tolist() or [0.0]
            raise ValueError(
                f"expected two or more times of shape [..., N, 1], increasing in equal steps, got {list(x.shape)} with steps "
                f"from {min(steps):g} to {max(steps):g}; give the inputs to predict(...) yourself"
            )
        ahead = torch.arange(1, horizon + 1, dtype=x.dtype, device=x.device)[:, None]
        x_new = x[..., -1:, :] + ahead * step
        return self.predict(guide, x, y, x_new, num_samples=num_samples, joint=joint, seed=seed)

    def _posteriors(self, guide: Guide, x: Tensor, y: Tensor, num_samples: int) -> Iterator[tuple[Trace, int]]:
        """Traces of the guide with numbers of draws of the processes: one trace suffices if it has no other sites."""
        posterior = prune_subsample_sites(poutine.trace(guide).get_trace(x, y))
        if {name for name, _ in posterior.iter_stochastic_nodes()} <= self.process_sites:
            yield posterior, num_samples
            return
        yield posterior, 1
        for _ in progress_bar(range(num_samples - 1), "posterior draws"):
            yield prune_subsample_sites(poutine.trace(guide).get_trace(x, y)), 1


def is_one_series(x: Tensor, y: Tensor | None) -> bool:
    """Whether inputs and data are those of one series, without a dimension for several.

    :param x: inputs.
    :param y: data.
    """
    return x.dim() == 2 and (y is None or y.dim() == 2)


def as_inputs(x: Tensor) -> Tensor:
    """Add dimensions of size 1 to inputs: for the latents, and for the plate of points if there are several series.

    :param x: inputs ``[N, P]`` or ``[B, N, P]``.
    :returns: inputs ``[1, N, P]`` or ``[B, 1, 1, N, P]``.
    """
    check_tensors([x])
    return x[:, None, None] if x.dim() == 3 else x[None]


def _check_draws(kernel: Kernel, params: KernelParams, point: Float[Tensor, "1 P"]) -> None:
    """Raise if several draws of a kernel's parameters would take the batch dimension of the latent processes."""
    if isinstance(kernel, Combination):
        for part, of_part in zip(kernel.kernels, params, strict=True):
            _check_draws(part, of_part, point)
    elif not kernel.batch_shape and (shape := kernel.diagonal(point, params).shape[:-1]):
        raise ValueError(
            f"expected a kernel with a batch dimension for the latent processes, since draws of its parameters take the "
            f"dimensions to the left, got {list(shape)} draws for {type(kernel).__name__} of batch shape (); make it with "
            "batch_shape=(1,)"
        )


@contextmanager
def _enter_all(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter several contexts."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _mean_step(x: Tensor) -> Tensor | None:
    """Mean step [..., 1, P] of times; None unless all steps are positive, and equal to 0.1 % and rounding."""
    steps = x.diff(dim=-2)
    mean = (x[..., -1:, :] - x[..., :1, :]) / steps.shape[-2]
    rounding = 2.0 * torch.finfo(x.dtype).eps * x.abs().amax(-2, keepdim=True)
    even = steps.numel() and (steps > 0.0).all() and ((steps - mean).abs() <= 1e-3 * mean + rounding).all()
    return mean if even else None


def _join(latents: Tensor, w: Tensor) -> Tensor:
    """Concatenate latents [*, N, Q] and [*, N, R] to [*, N, Q + R]."""
    lead = torch.broadcast_shapes(latents.shape[:-1], w.shape[:-1])
    return torch.cat([latents.expand(*lead, -1), w.expand(*lead, -1)], -1)
