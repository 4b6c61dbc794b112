"""Bayesian GPLVM in NumPyro, fitted by annealed and mean-field guides from the initial values of one of our models."""

import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import torch
from jax import Array
from jax.scipy.linalg import solve_triangular
from jaxtyping import Float, Int
from numpyro.distributions import constraints
from numpyro.handlers import seed as seeded
from numpyro.handlers import substitute
from numpyro.infer import SVI, Trace_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDAIS, AutoSemiDAIS
from numpyro.infer.util import potential_energy
from torch import Tensor

from pyro_lvgp.kernels import RBF
from pyro_lvgp.likelihoods import Gaussian
from pyro_lvgp.models import BayesianGPLVM

_JITTER, _INIT_SCALE = 1e-8, 0.1
_NUM_DRAWS = 64
_GuideName = Literal["semi", "full", "mean-field"]


class NumPyroDAIS:
    """Our ``BayesianGPLVM`` with an RBF kernel and Gaussian noise, written in NumPyro and fitted by differentiable annealing.

    ``"semi"`` is ``AutoSemiDAIS``: a chain of K uncorrected Hamiltonian steps for each row's X, from a Gaussian of its own;
    u is N(m_d, L_d L_dᵀ) for each output, as in our guides, with L_d made of parameters as in NumPyro's
    ``AutoBatchedMultivariateNormal``; rows are subsampled.  ``"full"`` is ``AutoDAIS``: one chain for X and u together, from a
    Gaussian with diagonal covariance, on all rows at every step.  ``"mean-field"`` has a diagonal Gaussian for each row's X,
    and the same q(u) as ``"semi"``.

    Everything is in float64, switched on inside the methods of this class only.  Kuu gets a jitter of 1e-8 times its mean
    diagonal; if that is not enough the bound becomes NaN, because a compiled program cannot try larger ones.

    Two defects of NumPyro 0.22 are corrected.  The chain of ``AutoDAIS`` uses the initial values of the hyperparameters, and
    the bound the learned ones; here both use the learned ones.  ``AutoSemiDAIS`` ignores ``gamma_init``; here it has effect.

    :param Y: all data, NaN where missing.
    :param model: initialised model, with the initial inducing points, RBF kernel, noise, mean, latents and inducing values.
    :param num_steps: length K of the chain; without effect for ``"mean-field"``.
    :param learning_rate: learning rate of Adam.
    :param batch_size: rows in a mini-batch; None for all rows.
    :param guide: ``"semi"``, ``"full"`` or ``"mean-field"``.
    :param options: ``eta_init``, ``eta_max`` and ``gamma_init`` of NumPyro's guide, with its own defaults.
    :raises ValueError: if the model is not initialised or not of this kind, or batch_size does not fit the data and the guide.

    Attributes: ``compile_seconds``, the wall seconds spent on compiling a training step; 0 before the first ``train``.
    """

    def __init__(
        self,
        Y: Float[Tensor, "N D"],
        model: BayesianGPLVM,
        *,
        num_steps: int,
        learning_rate: float,
        batch_size: int | None = None,
        guide: _GuideName = "semi",
        **options: float,
    ):
        _check(Y, model, batch_size, guide)
        self._num_data = len(Y)
        self._batch_size = len(Y) if batch_size is None else batch_size
        self.compile_seconds = 0.0
        self._update: Callable | None = None
        with jax.enable_x64(True):
            self._gplvm = _GPLVM(Y, model)
            start = {"X": _array(model.initial_values["X"]), "u": _array(model.initial_values["u"])}
            first = {"auto_z_0_loc": start["X"]} if guide == "semi" else {}
            if guide == "semi" and "gamma_init" in options:
                first["auto_gamma"] = jnp.full(self._num_data, options["gamma_init"])

            def pair(batch_size: int) -> tuple[Callable, Callable]:
                return _model_and_guide(self._gplvm, start, batch_size, guide, K=num_steps, **options)

            self._svi = SVI(*pair(self._batch_size), numpyro.optim.Adam(learning_rate), Trace_ELBO())
            # As one traced function, the set-up of a guide takes one compilation instead of one for each operation.
            rows = jnp.arange(self._batch_size)
            self._state = jax.jit(lambda: self._svi.init(jax.random.key(0), rows, init_params=first))()
            loss, draw = _on_all_rows(*pair(self._num_data), self._num_data)
            # The first call sets up the guide by a key of its own, so that later calls depend on their seeds alone.
            jax.eval_shape(draw, jax.random.key(0), self._svi.get_params(self._state))
            self._loss, self._draw = jax.jit(loss), jax.jit(draw)

    def train(self, num_steps: int, *, seed: int) -> list[float]:
        """Take Adam steps on shuffled mini-batches; return the wall seconds of each, without compilation."""
        with jax.enable_x64(True):
            self._state = self._state._replace(rng_key=jax.random.key(seed))
            if self._update is None:
                start = time.perf_counter()
                rows = jnp.arange(self._batch_size)
                self._update = jax.jit(self._svi.update).lower(self._state, rows).compile()
                self.compile_seconds = time.perf_counter() - start
            times = [time.perf_counter()]
            for idx in _batches(self._num_data, self._batch_size, num_steps, seed):
                self._state, _ = jax.block_until_ready(self._update(self._state, jnp.asarray(idx)))
                times.append(time.perf_counter())
        return np.diff(times).tolist()

    def negative_bound(self, *, num_evaluations: int, seed: int = 0) -> float:
        """Compute minus the bound on all data per datum by NumPyro's own code, averaged over runs of the chain."""
        with jax.enable_x64(True):
            params = self._svi.get_params(self._state)
            keys = jax.random.split(jax.random.key(seed), num_evaluations)
            return float(np.mean([self._loss(key, params) for key in keys])) / self._num_data

    def predict(self) -> Float[Tensor, "N D"]:
        """Compute the mean of f at the posterior means of X and u, over the ends of 64 chains; exact for a Gaussian u."""
        with jax.enable_x64(True):
            params = self._svi.get_params(self._state)
            draws = [self._draw(key, params) for key in jax.random.split(jax.random.key(0), _NUM_DRAWS)]
            X, u = (jnp.stack([draw[name] for draw in draws]).mean(0) for name in ("X", "u"))
            u = params.get("u_loc", u)
            hyperparameters = substitute(self._gplvm.hyperparameters, params)()
            f_mean, _ = self._gplvm.function(X, u, hyperparameters)
        return torch.tensor(np.asarray(f_mean))


class _Hyperparameters(NamedTuple):
    inducing_points: Float[Array, "M Q"]
    lengthscale: Float[Array, " Q"]
    variance: Float[Array, ""]
    noise: Float[Array, "*D"]


class _GPLVM:
    """Model whose hyperparameters are parameters of NumPyro, initialised at those of our model.

    ``AutoSemiDAIS`` needs it in two parts: ``outputs()`` draws u, and ``rows(u, batch_size)`` X and y given u.
    """

    def __init__(self, Y: Float[Tensor, "N D"], model: BayesianGPLVM):
        self._Y, self._observed = _array(torch.nan_to_num(Y)), jnp.asarray(~torch.isnan(Y).numpy(force=True))
        self._mean, self._num_inducing = _array(model.mean), model.num_inducing
        values = (model.inducing_points, model.kernel.lengthscale, model.kernel.variance, model.likelihood.variance)
        self._start = _Hyperparameters(*map(_array, values))

    def outputs(self) -> Float[Array, "D M"]:
        with numpyro.plate("outputs", len(self._mean)):
            return numpyro.sample("u", dist.Normal(0.0, 1.0).expand([self._num_inducing]).to_event(1))

    def rows(self, u: Float[Array, "D M"], batch_size: int) -> None:
        num_data, latent_dim = len(self._Y), self._start.inducing_points.shape[1]
        hyperparameters = self.hyperparameters()
        with numpyro.plate("data", num_data, subsample_size=batch_size) as idx:
            X = numpyro.sample("X", dist.Normal(0.0, 1.0).expand([latent_dim]).to_event(1))
            observed = self._observed[idx]
            f_mean, f_variance = self.function(X, u, hyperparameters)
            noise = hyperparameters.noise
            y = dist.Normal(f_mean, jnp.sqrt(noise)).mask(observed).to_event(1)
            numpyro.sample("y", y, obs=self._Y[idx])
            # E[log N(y; f, σ²)] over f given u, less log N(y; E[f], σ²)
            numpyro.factor("y_given_u", -0.5 * (observed * f_variance / noise).sum(-1))

    def function(
        self, X: Float[Array, "B Q"], u: Float[Array, "D M"], hyperparameters: _Hyperparameters
    ) -> tuple[Float[Array, "B D"], Float[Array, "B 1"]]:
        """Compute mean and variance of f given u."""
        Z, lengthscale, variance, _ = hyperparameters
        Kuu = _rbf(Z, Z, lengthscale, variance)
        Luu = jnp.linalg.cholesky(Kuu + _JITTER * jnp.diagonal(Kuu).mean() * jnp.eye(len(Z)))
        A = solve_triangular(Luu, _rbf(Z, X, lengthscale, variance), lower=True)
        f_variance = jnp.maximum(variance - jnp.square(A).sum(0), 0.0)
        return self._mean + A.T @ u.T, f_variance[:, None]

    def hyperparameters(self) -> _Hyperparameters:
        return _Hyperparameters(
            numpyro.param("inducing_points", self._start.inducing_points),
            *(
                numpyro.param(name, getattr(self._start, name), constraint=constraints.softplus_positive)
                for name in ("lengthscale", "variance", "noise")
            ),
        )


class _FullCovarianceGuide:
    """q(u_d) = N(m_d, L_d L_dᵀ), in the form that ``AutoSemiDAIS`` expects of a global guide."""

    def __init__(self, model: Callable, loc: Float[Array, "D M"]):
        self.model, self._loc = model, loc

    def __call__(self) -> dict[str, Float[Array, "D M"]]:
        data_dim, num_inducing = self._loc.shape
        scale = jnp.broadcast_to(_INIT_SCALE * jnp.eye(num_inducing), (data_dim, num_inducing, num_inducing))
        loc = numpyro.param("u_loc", self._loc)
        scale_tril = numpyro.param("u_scale_tril", scale, constraint=constraints.scaled_unit_lower_cholesky)
        with numpyro.plate("outputs", data_dim):
            return {"u": numpyro.sample("u", dist.MultivariateNormal(loc, scale_tril=scale_tril))}


def _mean_field_guide(gplvm: _GPLVM, start: dict[str, Array], batch_size: int) -> Callable[[], dict[str, Array]]:
    """Return a guide with a diagonal Gaussian for each row's X."""
    of_u = _FullCovarianceGuide(gplvm.outputs, start["u"])

    def guide() -> dict[str, Array]:
        loc = numpyro.param("X_loc", start["X"])
        scale = numpyro.param("X_scale", jnp.full_like(start["X"], _INIT_SCALE), constraint=constraints.positive)
        u = of_u()
        with numpyro.plate("data", len(loc), subsample_size=batch_size) as idx:
            return {**u, "X": numpyro.sample("X", dist.Normal(loc[idx], scale[idx]).to_event(1))}

    return guide


class _FollowingDAIS(AutoDAIS):
    """``AutoDAIS`` with a chain that uses the current parameters of the model in place of their initial values."""

    def _sample_latent(self, *args, **kwargs):
        sites = self.prototype_trace.items()
        params = {name: numpyro.param(name, s["value"], **s["kwargs"]) for name, s in sites if s["type"] == "param"}
        self._potential_fn = lambda latents: potential_energy(self.model, args, {}, {**latents, **params})
        return super()._sample_latent(*args, **kwargs)


def _model_and_guide(
    gplvm: _GPLVM, start: dict[str, Array], batch_size: int, name: _GuideName, **options
) -> tuple[Callable, Callable]:
    """Model and guide, both called with the indices of ``batch_size`` rows."""

    def rows(u):
        return gplvm.rows(u, batch_size)

    def model():
        return rows(gplvm.outputs())

    if name == "semi":
        of_u = _FullCovarianceGuide(gplvm.outputs, start["u"])
        auto = AutoSemiDAIS(model, rows, of_u, init_scale=_INIT_SCALE, subsample_plate="data", **options)
    elif name == "mean-field":
        auto = _mean_field_guide(gplvm, start, batch_size)
    else:
        auto = _FollowingDAIS(model, init_loc_fn=init_to_value(values=start), init_scale=_INIT_SCALE, **options)

    def guide(idx: Int[Array, " B"]) -> dict[str, Array]:
        with substitute(data={"data": idx}):
            return auto()

    # NumPyro's bounds substitute the rows of the guide into the model.
    return lambda idx: model(), guide


def _on_all_rows(model: Callable, guide: Callable, num_data: int) -> tuple[Callable, Callable]:
    """Return minus the bound, and draws of the guide, as functions of a key and parameters."""

    def loss(key: Array, params: dict[str, Array]) -> Float[Array, ""]:
        return Trace_ELBO().loss(key, params, model, guide, jnp.arange(num_data))

    def draw(key: Array, params: dict[str, Array]) -> dict[str, Array]:
        return substitute(seeded(guide, key), params)(jnp.arange(num_data))

    return loss, draw


def _batches(num_data: int, batch_size: int, num_steps: int, seed: int) -> Iterator[Int[np.ndarray, " B"]]:
    """Iterate over rows shuffled without replacement, without the last, shorter batch of an epoch, as in our fits."""
    random, rows = np.random.default_rng(seed), np.arange(num_data)
    per_epoch = num_data // batch_size
    for step in range(num_steps):
        # All rows stay in order: NumPyro does not index the rows' parameters in a plate that is not subsampled.
        if step % per_epoch == 0 and batch_size < num_data:
            rows = random.permutation(num_data)
        first = step % per_epoch * batch_size
        yield rows[first : first + batch_size]


def _rbf(
    X: Float[Array, "N Q"], Z: Float[Array, "M Q"], lengthscale: Float[Array, " Q"], variance: Float[Array, ""]
) -> Float[Array, "N M"]:
    X, Z = X / lengthscale, Z / lengthscale
    squared = jnp.square(X).sum(-1)[:, None] + jnp.square(Z).sum(-1) - 2.0 * X @ Z.T
    return variance * jnp.exp(-0.5 * squared)


def _array(value: Tensor) -> Array:
    return jnp.asarray(value.numpy(force=True), dtype=jnp.float64)


def _check(Y: Tensor, model: BayesianGPLVM, batch_size: int | None, guide: str) -> None:
    if not (isinstance(model.kernel, RBF) and isinstance(model.likelihood, Gaussian) and model.likelihood_term == "svgp"):
        kind = type(model.kernel).__name__, type(model.likelihood).__name__, model.likelihood_term
        raise ValueError(f'expected a model with kernel RBF, likelihood Gaussian and term "svgp", got {", ".join(kind)}')
    model.check(Y)
    missing = {"X", "u"} - model.initial_values.keys()
    if missing:
        raise ValueError(f"expected initial values of X and u, got none of {sorted(missing)}; call model.initialize(Y) first")
    if guide not in get_args(_GuideName):
        raise ValueError(f"expected guide in {get_args(_GuideName)}, got {guide!r}")
    if batch_size is not None and not 1 <= batch_size <= len(Y):
        raise ValueError(f"expected batch_size from 1 to {len(Y)}, the rows of the data, got {batch_size}")
    if guide == "full" and batch_size not in (None, len(Y)):
        raise ValueError(f"expected batch_size=None, because AutoDAIS cannot subsample, got {batch_size}; or use guide='semi'")
