"""Synthetic data sets of the papers."""

import math

import numpy as np
from jaxtyping import Float, Shaped
from scipy.special import expit
from sklearn.datasets import make_s_curve

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.datasets._dataset import Dataset

_LIKELIHOODS = ("gaussian", "bernoulli", "poisson", "negative-binomial", "binomial")
_JITTER = 1e-6


def s_curve(
    num_data: int = 500,
    data_dim: int = 100,
    *,
    noise: float | int = 0.5,
    mean: float | int | None = None,
    likelihood: str = "gaussian",
    total_count: int = 10,
    seed: int = 0,
) -> Dataset:
    """Outputs of a Gaussian process over latent points on an S-shaped curve.

    The latents ``X`` are the two coordinates of scikit-learn's S-curve that span the S, each divided by its standard
    deviation, in the order of the position ``t`` along the curve.  Each output d is drawn from

    ``F_d ~ N(mean, K)``, ``K = ½ exp(−½ ‖x − x′‖²) + ½ exp(−2 Σ_q sin²(π (x_q − x′_q) / 4.5))``,

    an RBF and a periodic kernel of lengthscale 1, and ``Y`` given ``F`` is Gaussian with standard deviation ``noise``,
    Bernoulli or binomial with logits ``F``, Poisson with rate ``exp F``, or negative binomial with mean
    ``total_count · exp F`` and ``total_count`` failures.

    :param num_data: number of points N.
    :param data_dim: number of outputs D.
    :param noise: standard deviation of Gaussian noise, in the units of ``Y``; other likelihoods do not use it.
    :param mean: constant added to the process; by default 5 for the Gaussian likelihood (as in SRFLVM) and 0 for the
        others, whose links would saturate at 5.
    :param likelihood: "gaussian", "bernoulli", "poisson", "negative-binomial" or "binomial".
    :param total_count: trials of the binomial, dispersion of the negative binomial.
    :param seed: seed of a generator of its own; NumPy's global state is not touched.
    :return: ``Y`` [N, D] (float64, or int64 counts), ``X`` [N, 2], ``F`` [N, D] (before noise and link), ``t`` [N].
    :raises ValueError: for an unknown likelihood, or sizes, noise or mean out of range.
    :raises TypeError: if a size is no integer.

    Source: "Scalable Random Feature Latent Variable Models" (SRFLVM), section 5.1, after Gundersen, Zhang and
    Engelhardt, AISTATS (2021).  The kernel, noise and mean are SRFLVM's; the papers do not say how the periodic kernel
    treats two inputs: here it is a product over them, which is positive definite.

    >>> data = s_curve(20, 3)
    >>> data.Y.shape, data.X.shape, data.F.shape, data.t.shape
    ((20, 3), (20, 2), (20, 3), (20,))
    """
    check_sizes(num_data=num_data, data_dim=data_dim, total_count=total_count)
    if likelihood not in _LIKELIHOODS:
        raise ValueError(f"expected a likelihood out of {', '.join(_LIKELIHOODS)}, got {likelihood!r}.")
    _check_noise(noise)
    if mean is None:
        mean = 5.0 if likelihood == "gaussian" else 0.0
    if not math.isfinite(mean):
        raise ValueError(f"expected a finite mean, got {mean}.")
    rng = np.random.default_rng(seed)
    points, t = make_s_curve(num_data, random_state=int(rng.integers(2**31)))
    t = np.atleast_1d(t)  # of one point it is a number
    order = t.argsort()
    X, t = points[order][:, [0, 2]], t[order]
    if num_data > 1:
        X = X / X.std(0)
    L = np.linalg.cholesky(_kernel(X) + _JITTER * np.eye(num_data))
    F = mean + L @ rng.standard_normal((num_data, data_dim))
    return Dataset(
        "s_curve",
        {"Y": _emit(rng, F, likelihood, noise, total_count), "X": X, "F": F, "t": t},
        f"Gaussian process over an S-shaped curve, {likelihood} likelihood, seed {seed}.",
        {
            "Y": "observations [dimensionless]" if likelihood == "gaussian" else "counts",
            "X": "true latent points, unit variance [dimensionless]",
            "F": "function values before noise and link [dimensionless]",
            "t": "position along the curve [radians]",
        },
        "Gundersen, Zhang, Engelhardt, AISTATS (2021)",
        "generated: none needed",
        "pyro_lvgp.datasets.s_curve",
    )


def bouncing_balls(
    num_sequences: int = 80,
    num_steps: int = 50,
    num_pixels: int = 12,
    *,
    period: float | int = 16.0,
    width: float | int = 1.0,
    noise: float | int = 0.1,
    gravity: bool = False,
    seed: int = 0,
) -> Dataset:
    """Sequences of one-dimensional images of a ball that bounces between the two ends of a line of pixels.

    The ball moves at constant speed and turns round at the ends, or, with ``gravity``, falls to the first pixel and bounces
    back to the last, with the same period in every sequence and a start (place and direction) drawn uniformly.  Pixel j of a
    noiseless image is ``exp(−½ (j − position)² / width²)``.

    :param num_sequences: number of sequences S.
    :param num_steps: images in a sequence T.
    :param num_pixels: pixels in an image P.
    :param period: time of a movement there and back, in steps.
    :param width: width of the ball, in pixels.
    :param noise: standard deviation of the Gaussian noise on every pixel.
    :param gravity: whether the ball falls.
    :param seed: seed of a generator of its own; NumPy's global state is not touched.
    :return: ``Y`` [S, T, P], noiseless images ``F`` [S, T, P], ``t`` [T] in steps, ``position`` [S, T] in pixels.
    :raises ValueError: if a size, the period or the width is not positive, or the noise is negative or not finite.
    :raises TypeError: if a size is no integer.

    Source: the task of Johnson et al., structured variational autoencoders (2016), as used in section 5.5 of the GP-VAE
    thesis, which gives the sizes and the uniform start.  It states neither period, width nor noise: these are ours.

    >>> data = bouncing_balls(2, 5)
    >>> data.Y.shape, data.t.shape, data.position.shape
    ((2, 5, 12), (5,), (2, 5))
    """
    check_sizes(num_sequences=num_sequences, num_steps=num_steps, num_pixels=num_pixels)
    for name, value in {"period": period, "width": width}.items():
        if not value > 0:
            raise ValueError(f"expected a positive {name}, got {value}.")
    _check_noise(noise)
    rng = np.random.default_rng(seed)
    t = np.arange(num_steps, dtype=np.float64)
    phase = (t / period + rng.uniform(size=(num_sequences, 1))) % 1.0
    height = 1.0 - np.abs(2.0 * phase - 1.0)
    # Thrown up at phase 0, a ball is at 4 φ (1 − φ) of its highest place.
    position = (num_pixels - 1) * (4.0 * phase * (1.0 - phase) if gravity else height)
    F = np.exp(-0.5 * ((np.arange(num_pixels) - position[..., None]) / width) ** 2)
    return Dataset(
        "bouncing_balls",
        {"Y": F + noise * rng.standard_normal(F.shape), "F": F, "t": t, "position": position},
        f"A ball that bounces between the ends of a line of pixels, seed {seed}.",
        {
            "Y": "noisy brightness: sequence × step × pixel [dimensionless]",
            "F": "noiseless brightness [dimensionless]",
            "t": "time [steps]",
            "position": "place of the ball [pixels]",
        },
        "Johnson et al., Composing graphical models with neural networks, NeurIPS (2016)",
        "generated: none needed",
        "pyro_lvgp.datasets.bouncing_balls",
    )


def _kernel(X: Float[np.ndarray, "N Q"]) -> Float[np.ndarray, "N N"]:
    difference = X[:, None] - X[None]
    rbf = np.exp(-0.5 * (difference**2).sum(-1))
    periodic = np.exp(-2.0 * (np.sin(np.pi * difference / 4.5) ** 2).sum(-1))
    return 0.5 * rbf + 0.5 * periodic


def _emit(
    rng: np.random.Generator, F: Float[np.ndarray, "N D"], likelihood: str, noise: float | int, total_count: int
) -> Shaped[np.ndarray, "N D"]:
    if likelihood == "gaussian":
        return F + noise * rng.standard_normal(F.shape)
    if likelihood == "poisson":
        return rng.poisson(np.exp(F))
    if likelihood == "negative-binomial":
        return rng.negative_binomial(total_count, expit(-F))  # NumPy counts failures before total_count successes
    return rng.binomial(1 if likelihood == "bernoulli" else total_count, expit(F))


def _check_noise(noise: float | int) -> None:
    if not 0 <= noise < math.inf:
        raise ValueError(f"expected a finite noise standard deviation of at least 0, got {noise}.")
