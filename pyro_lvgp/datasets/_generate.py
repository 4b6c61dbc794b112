"""Synthetic data sets of the papers."""

import math

import numpy as np
from jaxtyping import Float, Shaped
from scipy.special import expit
from sklearn.datasets import make_s_curve

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.datasets._dataset import Dataset

_LIKELIHOODS = ("gaussian", "bernoulli", "poisson", "negative-binomial", "binomial")
_JITTER = 1e-6


@names_types
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

    The latent points ``X`` are the two coordinates of scikit-learn's S-curve that span the S, each divided by its standard
    deviation.  They are sorted by the position ``t`` along the curve.  Each output d is drawn from

    ``F_d ~ N(mean, K)``, ``K = ½ exp(−½ ‖x − x′‖²) + ½ exp(−2 Σ_q sin²(π (x_q − x′_q) / 4.5))``,

    a sum of an RBF and a periodic kernel with lengthscale 1.  Given ``F``, the observations ``Y`` are Gaussian with standard
    deviation ``noise``, Bernoulli or binomial with logits ``F``, Poisson with rate ``exp F``, or negative binomial with
    mean ``total_count · exp F`` and ``total_count`` failures.

    :param num_data: number of points N.
    :param data_dim: number of outputs D.
    :param noise: standard deviation of Gaussian noise, in the units of ``Y``; other likelihoods do not use it.
    :param mean: constant added to the process; by default 5 for the Gaussian likelihood (as in the SRFLVM paper) and 0 for
        the others, whose links saturate at 5.
    :param likelihood: "gaussian", "bernoulli", "poisson", "negative-binomial" or "binomial".
    :param total_count: number of trials of the binomial, dispersion of the negative binomial likelihood.
    :param seed: seed of the random generator; the global random state of NumPy is not changed.
    :return: ``Y`` [N, D] (float64, or int64 counts), ``X`` [N, 2], ``F`` [N, D] (before noise and link), ``t`` [N].
    :raises ValueError: for an unknown likelihood, or sizes, noise or mean out of range.
    :raises TypeError: if a size is no integer.

    Source: Li et al. (2024), "Scalable random feature latent variable models" (SRFLVM), section 5.1, for kernel, noise and
    mean; Gundersen, Zhang and Engelhardt (2021).  The papers do not state the periodic kernel of two inputs.  Here it is a
    product over the inputs, which is positive definite.

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
    t = np.atleast_1d(t)  # scikit-learn returns a number for one point
    order = t.argsort()
    X, t = points[order][:, [0, 2]], t[order]
    if num_data > 1:
        X = X / X.std(0)
    L = np.linalg.cholesky(_kernel(X) + _JITTER * np.eye(num_data))
    F = mean + L @ rng.standard_normal((num_data, data_dim))
    return Dataset(
        "s_curve",
        {"Y": _sample_observations(rng, F, likelihood, noise, total_count), "X": X, "F": F, "t": t},
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


@names_types
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

    The ball moves at constant speed and reverses its direction at the ends.  With ``gravity`` it falls to the first pixel and
    bounces back to the last.  All sequences have the same period.  The initial position and direction of each sequence are
    drawn uniformly.  Pixel j of a noiseless image is ``exp(−½ (j − position)² / width²)``.

    :param num_sequences: number of sequences S.
    :param num_steps: number of images T in a sequence.
    :param num_pixels: number of pixels P in an image.
    :param period: time after which position and direction repeat, in steps.
    :param width: width of the ball, in pixels.
    :param noise: standard deviation of the Gaussian noise of each pixel.
    :param gravity: whether the ball falls.
    :param seed: seed of the random generator; the global random state of NumPy is not changed.
    :return: ``Y`` [S, T, P], noiseless images ``F`` [S, T, P], ``t`` [T] in steps, ``position`` [S, T] in pixels.
    :raises ValueError: if a size, the period or the width is not positive, or the noise is negative or not finite.
    :raises TypeError: if a size is no integer.

    Source: Johnson et al. (2016), "Composing graphical models with neural networks for structured representations and fast
    inference"; section 5.5 of the GP-VAE thesis for the sizes and the uniform initial position.  The thesis does not state
    period, width and noise.

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
    # Under gravity the height is the fraction 4 φ (1 − φ) of the largest one, at phase φ after a bounce.
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
            "position": "position of the ball [pixels]",
        },
        "Johnson et al., Composing graphical models with neural networks, NeurIPS (2016)",
        "generated: none needed",
        "pyro_lvgp.datasets.bouncing_balls",
    )


@names_types
def single_cells(
    num_cells: int = 1500,
    num_genes: int = 200,
    *,
    num_types: int = 6,
    num_batches: int = 3,
    batch_effect: float | int = 0.5,
    dispersion: float | int = 2.0,
    seed: int = 0,
) -> Dataset:
    """Counts of the transcripts of genes in cells of several types, from several batches, sequenced to several depths.

    The state of a cell is that of its type, a draw from N(0, I) of four dimensions, plus N(0, 0.3² I).  The logarithm of the
    expression of a gene is the sum of a mean from N(0, 1), of a Gaussian process of the state with a squared exponential
    kernel of lengthscale 3 and unit variance, and of an effect of the batch from N(0, batch_effect²).  Expected counts are in
    proportion to the expression, with a sum over genes that is the depth of the cell, log-normal with median 500 and standard
    deviation 0.5.  Counts are negative binomial, with variance ``m + m² / dispersion`` at mean m.

    :param num_cells: number of cells N.
    :param num_genes: number of genes D.
    :param num_types: number of types of cells.
    :param num_batches: number of batches, to which cells are assigned at random.
    :param batch_effect: standard deviation of the effects of batches on the logarithm of the expression.
    :param dispersion: dispersion r of the counts.
    :param seed: seed of the random generator; the global random state of NumPy is not changed.
    :return: ``Y`` [N, D] (int64), ``type`` [N], ``batch`` [N], ``depth`` [N], ``state`` [N, 4], ``mean`` [N, D].
    :raises ValueError: if a size or the dispersion is not positive, or the effect is negative or not finite.
    :raises TypeError: if a size is no integer.

    Source: Lopez et al. (2018), "Deep generative modeling for single-cell transcriptomics", for depths, batches and the
    distribution of counts.

    >>> data = single_cells(20, 5)
    >>> data.Y.shape, data["type"].shape, data.state.shape
    ((20, 5), (20,), (20, 4))
    """
    check_sizes(num_cells=num_cells, num_genes=num_genes, num_types=num_types, num_batches=num_batches)
    if not 0 <= batch_effect < math.inf or not 0 < dispersion < math.inf:
        raise ValueError(
            f"expected a batch_effect of 0 or more and a positive dispersion, got {batch_effect} and {dispersion}."
        )
    rng = np.random.default_rng(seed)
    kind, batch = rng.integers(num_types, size=num_cells), rng.integers(num_batches, size=num_cells)
    state = rng.standard_normal((num_types, 4))[kind] + 0.3 * rng.standard_normal((num_cells, 4))
    frequencies, phase = rng.standard_normal((4, 300)) / 3.0, rng.uniform(0.0, 2.0 * np.pi, 300)
    functions = np.cos(state @ frequencies + phase) @ rng.standard_normal((300, num_genes)) * (2.0 / 300) ** 0.5
    effects = batch_effect * rng.standard_normal((num_batches, num_genes))
    expression = np.exp(rng.standard_normal(num_genes) + functions + effects[batch])
    depth = 500.0 * np.exp(0.5 * rng.standard_normal(num_cells))
    mean = depth[:, None] * expression / expression.sum(1, keepdims=True)
    return Dataset(
        "single_cells",
        {
            "Y": rng.negative_binomial(dispersion, dispersion / (dispersion + mean)),
            "type": kind,
            "batch": batch,
            "depth": depth,
            "state": state,
            "mean": mean,
        },
        f"Simulated counts of genes in cells of {num_types} types from {num_batches} batches, seed {seed}.",
        {
            "Y": "counts: cell × gene",
            "type": "type of the cell",
            "batch": "batch of the cell",
            "depth": "expected sum of the counts of the cell",
            "state": "true state of the cell [dimensionless]",
            "mean": "expected counts: cell × gene",
        },
        "Lopez et al., Deep generative modeling for single-cell transcriptomics, Nature Methods 15 (2018)",
        "generated: none needed",
        "pyro_lvgp.datasets.single_cells",
    )


def _kernel(X: Float[np.ndarray, "N Q"]) -> Float[np.ndarray, "N N"]:
    """Compute the covariance matrix of the S-curve's functions."""
    difference = X[:, None] - X[None]
    rbf = np.exp(-0.5 * (difference**2).sum(-1))
    periodic = np.exp(-2.0 * (np.sin(np.pi * difference / 4.5) ** 2).sum(-1))
    return 0.5 * rbf + 0.5 * periodic


def _sample_observations(
    rng: np.random.Generator, F: Float[np.ndarray, "N D"], likelihood: str, noise: float | int, total_count: int
) -> Shaped[np.ndarray, "N D"]:
    """Draw observations of functions from a likelihood."""
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
