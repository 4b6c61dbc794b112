"""GP-VAE with a linear decoder and Gaussian noise, whose posterior is computed in closed form."""

import os
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Gamma, MultivariateNormal
from torch.nn import functional as F

from pyro_lvgp._utils.abstract import AbstractModuleMeta
from pyro_lvgp._utils.argument_types import checks_types, names_types
from pyro_lvgp._utils.progress import progress_bar
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.representation import Represented
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_new_inputs, check_series, check_sizes
from pyro_lvgp.conjugate import linear_decoder
from pyro_lvgp.conjugate.linear_decoder import DecoderFactors, LatentMoments, Table
from pyro_lvgp.distributions.likelihood_predictive import LikelihoodPredictive
from pyro_lvgp.kernels import Kernel, Stack
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models._ascent import Ascent, AscentFile, pack_factors, unpack_factors
from pyro_lvgp.models.initialization import column_moments, linear_latents
from pyro_lvgp.models.prediction import Prediction
from pyro_lvgp.ops import joint_sites, state_space
from pyro_lvgp.ops.state_space import StateSpaceModel

__all__ = ["LinearGPVAE"]

_STEP_GROWTH = 1.2  # of over-relaxed steps
_LARGEST_VARIANCE = 1e8  # of a process, in units of the standardised data


class LinearGPVAE(Represented, nn.Module, metaclass=AbstractModuleMeta):
    r"""GP-VAE with a linear decoder, whose weights, relevances and noise have priors, and with exact sites.

    .. math::

        y_{nd} = w_d^T (f_n, s_n) + b_d + \epsilon_{nd}, \quad f_q \sim GP(0, k_q), \quad s_n \sim N(0, I_R / u_n), \quad
        \epsilon_{nd} \sim N\big(0, 1 / (\tau_d u_n)\big), \quad w_{dq} \sim N(0, 1 / \alpha_q)

    for N points of one series.  The priors of :math:`\alpha_q`, :math:`\tau_d` and the row scales :math:`u_n` are gamma
    distributions; by the latter, the white part of a row is a multivariate Student's t.  Missing entries are NaN.

    The posterior of processes and white latents is exact given the moments of the decoder, with all covariances between the
    latents of a point.  It is computed with the factors of the decoder in turn, each in closed form, so that there is neither
    an encoder nor a learning rate except for the parameters of the kernels.  The cost of a sweep is linear in N for Markov
    kernels of one input (:class:`~pyro_lvgp.kernels.Matern`, sums and products), and :math:`O((N Q)^3)` for others.

    Several series that share the decoder are one series if they are far apart on the axis of the inputs.  Computations are in
    double precision.  The model stores its data, on which predictions are conditioned, and :func:`~pyro_lvgp.infer.save` and
    ``state_dict()`` write them.

    :param kernel: covariance with a batch dimension over the Q processes; None for white latents alone.  Parameters that
        require gradients are learned.  The weights have the scale of a process, so that a variance can be frozen.
    :param independent_dim: number R of white latents.
    :raises ValueError: for a negative ``independent_dim``, no latents, or a kernel without a batch dimension.

    Source: Ashman (2020), eqs. 3.1 to 3.4, with the sites of a linear decoder; Bishop (1999), "Variational principal
    components"; Luttinen and Ilin (2009), "Variational Gaussian-process factor analysis for modeling spatio-temporal data".

    >>> from pyro_lvgp.kernels import Matern
    >>> t = torch.linspace(0.0, 1.0, 50, dtype=torch.float64)[:, None]
    >>> y = torch.sin(9.0 * t) + 0.1 * torch.randn(50, 3, dtype=torch.float64)
    >>> y[30:, 0] = torch.nan
    >>> model = LinearGPVAE(Matern(1, 1.5, lengthscale=0.2, batch_shape=(2,)), independent_dim=1)
    >>> bounds = model.fit(t, y, num_sweeps=20)
    >>> model.predict().mean.shape, model.predict(torch.tensor([[1.1]], dtype=torch.float64)).mean.shape
    (torch.Size([50, 3]), torch.Size([1, 3]))
    """

    x: Float[Tensor, "N P"]
    table: Table
    factors: DecoderFactors | None = None
    centre: Float[Tensor, " D"]
    scale: Float[Tensor, " D"]
    dtype: torch.dtype

    @checks_types
    @names_types
    def __init__(self, kernel: Kernel | None, *, independent_dim: int = 0):
        super().__init__()
        if independent_dim < 0 or (kernel is None and not independent_dim):
            raise ValueError(
                f"expected a kernel or independent_dim of 1 or more, got kernel={kernel} and independent_dim={independent_dim}"
            )
        if kernel is not None and len(kernel.batch_shape) != 1:
            raise ValueError(
                f"expected a kernel with one batch dimension over the processes, got batch_shape={tuple(kernel.batch_shape)}; "
                "make it with batch_shape=(Q,), or Stack several kernels"
            )
        self.kernel: Any = None if kernel is None else kernel.double()
        self.independent_dim = independent_dim
        self.process_dim = 0 if kernel is None else kernel.batch_shape[0]

    @torch.inference_mode(False)  # moments are derivatives wherever the method is called
    @names_types
    @pyro_lock
    def fit(
        self,
        x: Float[Tensor, "N P"],
        y: Float[Tensor, "N D"],
        *,
        num_sweeps: int = 200,
        tolerance: float = 1e-5,
        learning_rate: float = 0.05,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int = 20,
    ) -> list[float]:
        """Maximise the bound on the log evidence by sweeps through all factors.

        :param x: inputs.
        :param y: data, NaN where missing.  Each output is standardised by its observed entries.
        :param num_sweeps: maximum number of sweeps.
        :param tolerance: gain of a sweep, in nats per observed entry, below which the fit ends.
        :param learning_rate: of Adam on the parameters of the kernel, one step in each sweep.
        :param checkpoint: name of a file to which the state of the fit is written; if it exists, the fit continues from it as
            if it had not been interrupted.
        :param checkpoint_every: number of sweeps between two writes.
        :returns: bounds in nats, one for each sweep, on the evidence of the standardised data.
        :raises ValueError: for data of another shape, inputs that are not finite, outputs without an observation, or processes
            with prior variances above 1e8; for a checkpoint that cannot be read, or is one of other data or settings.
        :raises OSError: if the checkpoint cannot be written; the last one then is as it was.
        """
        check_sizes(num_sweeps=num_sweeps, checkpoint_every=checkpoint_every)
        check_series(x, y)
        # Tensors of inference mode cannot be differentiated, but copies of them can.
        self.x, self.dtype, y = x.double().clone(), y.dtype, y.double().clone()
        self._check_scale()
        self.centre, self.scale = column_moments(y)
        y = (y - self.centre) / self.scale
        self.table = Table.of(y)
        parameters = self._trained()
        optim = torch.optim.Adam(parameters, learning_rate) if parameters else None
        least = tolerance * self.table.observed.sum().item()
        file = None
        if checkpoint is not None:
            settings = {"x": self.x, "y": y.nan_to_num(), "observed": self.table.observed, "learning_rate": learning_rate}
            parts = [] if self.kernel is None else [type(part).__name__ for part in self.kernel.modules()]
            settings |= {"independent_dim": self.independent_dim, "process_dim": self.process_dim, "kernel": parts}
            file = AscentFile(checkpoint, checkpoint_every, settings, self.kernel, optim)
        if file is not None and (resumed := file.read()) is not None:
            ascent, bounds = resumed
        else:
            factors = self._initial_factors(y)
            ascent, bounds = Ascent(factors, factors), []
        for _ in progress_bar(range(len(bounds), num_sweeps), "sweeps"):
            ascent, posterior, bound = self._sweep(ascent)
            self.factors = ascent.q
            bounds.append(bound)
            if len(bounds) == num_sweeps or (len(bounds) > 1 and abs(bounds[-1] - bounds[-2]) < least):
                break
            ascent = self._next(ascent, posterior, bound)
            if optim is not None:
                for parameter, gradient in zip(parameters, posterior.gradients, strict=True):
                    parameter.grad = -gradient
                optim.step()
            if file is not None:
                file.write(ascent, bounds)
        return bounds

    @torch.inference_mode(False)
    @names_types
    @pyro_lock
    def predict(self, x_new: Float[Tensor, "M P"] | None = None, *, num_samples: int = 100, seed: int = 0) -> Prediction:
        """Predict y, as a mixture over draws of the decoder in which the latents are integrated out.

        Draws of the weights come in pairs around their mean, so that with an even number of them the predictive mean is exact.
        Variances have a Monte Carlo error, which the order of the outputs changes.

        :param x_new: inputs; those of the data by default.
        :param num_samples: number of draws of weights, noise and row scales.
        :param seed: seed of the draws.
        :raises ValueError: before :meth:`fit`, if ``num_samples`` is not positive, or if inputs do not fit.
        """
        check_sizes(num_samples=num_samples)
        if self.factors is None:
            raise ValueError("expected a fitted model, got one without data; call fit(x, y)")
        x, table, q = self.x, self.table, self.factors
        if x_new is not None:
            check_new_inputs(x_new, x, table.y)
            x = torch.cat([x, x_new.double()])
            table = Table(*(F.pad(part, (0, 0, 0, len(x_new))) for part in table))
            q = q._replace(row_scale=_extended(q.row_scale, 0.5 * q.dof.expand(len(x_new))))
        z, row_scale = self._condition(x, table, q).latents, q.row_scale
        if x_new is not None:
            z = LatentMoments(z.mean[-len(x_new) :], z.covariance[-len(x_new) :])
            row_scale = Gamma(row_scale.concentration[-len(x_new) :], row_scale.rate[-len(x_new) :])
        with seeded(seed):
            first = MultivariateNormal(q.mean, q.covariance, validate_args=False).sample(((num_samples + 1) // 2,))
            weights = torch.cat([first, 2.0 * q.mean - first])[:num_samples]
            noise = q.noise.sample((num_samples,))[:, None, :] * row_scale.sample((num_samples,))[:, :, None]
        mean = torch.einsum("sdi,ni->snd", weights, z.with_constant()[0])
        loadings = weights[..., :-1]
        pairs = (loadings[..., :, None] * loadings[..., None, :]).flatten(-2)
        variance = torch.einsum("sdi,ni->snd", pairs, z.covariance.flatten(-2)).clamp_min(0.0)
        mean, variance, noise = self.centre + self.scale * mean, self.scale.square() * variance, self.scale.square() / noise
        inputs = self.x if x_new is None else x_new
        return Prediction(
            [LikelihoodPredictive(Gaussian(), mean.to(self.dtype), variance.to(self.dtype), "fitc", noise.to(self.dtype))],
            dims=("points", "output"),
            coords={"x": (("points", "input"), inputs)},
        )

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return data and factors, for ``state_dict()``; nothing before :meth:`fit`."""
        if self.factors is None:
            return {}
        return {
            **{name: getattr(self, name) for name in ("x", "centre", "scale")},
            **self.table._asdict(),
            **{f"factors.{name}": value for name, value in pack_factors(self.factors).items()},
            "dtype": torch.empty(0, dtype=self.dtype),
        }

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Restore data and factors.

        :param state: returned by :meth:`get_extra_state`.
        """
        if not state:
            self.factors = None
            return
        self.x, self.centre, self.scale = state["x"], state["centre"], state["scale"]
        self.table, self.dtype = Table(state["y"], state["observed"]), state["dtype"].dtype
        factors = {name.removeprefix("factors."): value for name, value in state.items() if name.startswith("factors.")}
        self.factors = unpack_factors(factors)

    def _check_scale(self) -> None:
        """Raise if prior variances of the processes are too large for double precision, as of a linear kernel far away."""
        if self.kernel is None:
            return
        largest = float(self.kernel.diagonal(self.x).detach().max())
        if not largest <= _LARGEST_VARIANCE:
            raise ValueError(
                f"expected prior variances of at most {_LARGEST_VARIANCE:.0e} at the inputs, since data are standardised, got "
                f"{largest:.1e}; standardise the inputs, or give the kernel a smaller variance"
            )

    def _trained(self) -> list[Tensor]:
        return [] if self.kernel is None else [part for part in self.kernel.parameters() if part.requires_grad]

    def _initial_factors(self, y: Float[Tensor, "N D"]) -> DecoderFactors:
        """Factors given principal components as the values of the processes and again of the white latents."""
        Q, R = self.process_dim, self.independent_dim
        X, filled = linear_latents(y, min(max(Q, R), y.shape[1]), num_iterations=100)
        columns = torch.cat([torch.arange(Q), torch.arange(R)]).to(y.device) % X.shape[1]
        X = X[:, columns]
        noise = (0.1 * filled.var(0, correction=min(1, len(y) - 1))).clamp_min(1e-3)
        q = linear_decoder.initial_factors(self.table, X.new_ones(y.shape[1], Q + R), noise)
        return linear_decoder.update_weights(self.table, q, LatentMoments(X, torch.zeros_like(X[:, :, None] * X[:, None, :])))

    def _sweep(self, ascent: Ascent) -> tuple[Ascent, "_Conditioned", float]:
        """Compute the posterior of the latents given the factors, and the bound; undo an over-relaxed step that lowers it."""
        posterior, bound = self._bound(ascent.q)
        if bound < ascent.best and ascent.step > 1.0:
            ascent = ascent._replace(q=ascent.updated, step=1.0)
            posterior, bound = self._bound(ascent.q)
        return ascent, posterior, bound

    def _bound(self, q: DecoderFactors) -> tuple["_Conditioned", float]:
        posterior = self._condition(self.x, self.table, q)
        constant = linear_decoder.site_constant(self.table, q, self.independent_dim)
        return posterior, (posterior.log_normaliser + constant - linear_decoder.divergence(q)).item()

    def _next(self, ascent: Ascent, posterior: "_Conditioned", bound: float) -> Ascent:
        """Update each factor given the posterior of the latents."""
        rescaled, z = linear_decoder.rescale_latents(ascent.q, posterior.latents, posterior.process_squares)
        updated = self._updated(rescaled, z)
        return Ascent(linear_decoder.extrapolate(rescaled, updated, ascent.step), updated, ascent.step * _STEP_GROWTH, bound)

    def _updated(self, q: DecoderFactors, z: LatentMoments) -> DecoderFactors:
        """Update each factor of the decoder."""
        q = linear_decoder.update_relevance(linear_decoder.update_weights(self.table, q, z))
        q = linear_decoder.update_noise(self.table, q, z)
        return linear_decoder.update_dof(linear_decoder.update_row_scales(self.table, q, z, self.independent_dim))

    def _condition(self, x: Tensor, table: Table, q: DecoderFactors) -> "_Conditioned":
        """Compute the exact posterior of all latents given the moments of the decoder."""
        linear, precision = linear_decoder.latent_sites(table, q)
        linear, precision, log_normaliser, white = linear_decoder.marginalize_white(
            linear, precision, q.row_scale.mean, self.independent_dim
        )
        if self.kernel is None:
            empty = LatentMoments(linear, precision)
            return _Conditioned(white.joint(empty), log_normaliser, linear.new_zeros(0), ())
        with torch.enable_grad():
            linear, precision = linear.detach().requires_grad_(), precision.detach().requires_grad_()
            scale = torch.ones(self.process_dim, dtype=x.dtype, device=x.device, requires_grad=True)
            value = self._log_normaliser(x, linear, precision, scale)
            mean, half_square, of_scale, *gradients = torch.autograd.grad(value, [linear, precision, scale, *self._trained()])
        second = -half_square - half_square.mT
        moments = LatentMoments(mean, second - mean[:, :, None] * mean[:, None, :])
        # ∂ log Z / ∂ log σ² = ½ (E[fᵀ K⁻¹ f] − N)
        squares = len(x) + 2.0 * of_scale
        return _Conditioned(white.joint(moments), log_normaliser + value.detach(), squares, tuple(gradients))

    def _log_normaliser(self, x: Tensor, linear: Tensor, precision: Tensor, scale: Float[Tensor, " Q"]) -> Tensor:
        """Log normaliser of the processes, whose covariances are multiplied by a scale."""
        assert self.kernel is not None
        if self.kernel.is_markov and x.shape[1] == 1:
            steps, order, _ = state_space.sort_inputs(x.squeeze(-1))
            models = _state_space_models(self.kernel, steps)
            scales = scale.split([len(model.emission) for model in models])
            scaled = [
                model._replace(P=own[:, None, None] * model.P, Q=own[:, None, None, None] * model.Q)
                for model, own in zip(models, scales, strict=True)
            ]
            return state_space.joint_log_normaliser(scaled, linear[order], precision[order])
        return joint_sites.joint_log_normaliser(scale[:, None, None] * self.kernel(x), linear, precision)


class _Conditioned(NamedTuple):
    """Posterior of the latents.

    :param latents: moments of processes and white latents.
    :param log_normaliser: log Z of all latents.
    :param process_squares: ``E[f_qᵀ K_q⁻¹ f_q]`` of each process.
    :param gradients: gradients of log Z with respect to the trained parameters of the kernel.
    """

    latents: LatentMoments
    log_normaliser: Float[Tensor, ""]
    process_squares: Float[Tensor, " Q"]
    gradients: tuple[Tensor, ...]


def _state_space_models(kernel: Kernel, steps: Float[Tensor, " T"]) -> list[StateSpaceModel]:
    """Models of the processes by groups with one size of their states, each with a batch dimension."""
    params = kernel.params()
    models = (
        kernel.state_space_models(steps, params) if isinstance(kernel, Stack) else [kernel.state_space_model(steps, params)]
    )
    return [model if model.emission.dim() > 1 else StateSpaceModel(*(part.unsqueeze(0) for part in model)) for model in models]


def _extended(row_scale: Gamma, half_dof: Float[Tensor, " M"]) -> Gamma:
    """Factors of row scales, with the prior for further rows."""
    shape, rate = (torch.cat([part, half_dof]) for part in (row_scale.concentration, row_scale.rate))
    return Gamma(shape, rate, validate_args=False)
