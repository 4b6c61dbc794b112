"""Initial latents by linear models or t-SNE, inducing points by k-means, and mixture densities of latents by EM."""

from itertools import combinations
from typing import Literal, get_args

import numpy as np
import pyro.distributions as dist
import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.progress import progress_bar

__all__ = [
    "cluster_centres",
    "column_moments",
    "jointly_diagonalizing_rotation",
    "kaiser_dim",
    "latent_mixture",
    "linear_latents",
    "tsne_layout",
]

InitialLatents = Literal["pca", "factor-analysis"]
MAX_TSNE_DIM, MIN_TSNE_ROWS = 3, 5


@names_types
def linear_latents(
    Y: Float[Tensor, "N D"], latent_dim: int, *, method: InitialLatents = "pca", num_iterations: int = 20, seed: int = 0
) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N D"]]:
    """Compute latents of unit variance by PCA or factor analysis, and impute missing entries by the same linear model.

    Missing entries (NaN) are imputed by alternating between a fit of the linear model and its reconstruction of these entries.
    Latent dimensions beyond the rank of the centred data, or with no loadings in factor analysis, are random.  All latent
    dimensions are centred.

    :param Y: data.
    :param latent_dim: number of latent dimensions Q.
    :param method: ``"pca"``, or ``"factor-analysis"``, which has a noise variance for each output.
    :param num_iterations: number of imputations; none take place for complete data.
    :param seed: seed of scikit-learn's solvers and of the random latent dimensions.
    :returns: latents, and Y with imputed entries.
    :raises ValueError: for another method.

    >>> X, filled = linear_latents(torch.randn(20, 5), 2)
    >>> X.shape, filled.shape
    (torch.Size([20, 2]), torch.Size([20, 5]))
    """
    if method not in get_args(InitialLatents):
        raise ValueError(f"expected method in {get_args(InitialLatents)}, got {method!r}")
    values = Y.detach().cpu().double().numpy()
    missing = np.isnan(values)
    filled = np.where(missing, np.nanmean(values, axis=0), values)
    rank = _centred_rank(filled, latent_dim, seed)
    from sklearn import config_context  # imported where it is used, since scikit-learn takes a second
    from sklearn.decomposition import PCA, FactorAnalysis

    linear = PCA(rank, whiten=True, random_state=seed) if method == "pca" else FactorAnalysis(rank, random_state=seed)
    with config_context(assume_finite=True, skip_parameter_validation=True):  # checks take longer than fits of small data
        for _ in progress_bar(range(num_iterations if rank and missing.any() else 0), "initial latents"):
            scores = linear.fit_transform(filled)
            fitted = linear.inverse_transform(scores) if method == "pca" else scores @ linear.components_ + linear.mean_
            filled = np.where(missing, fitted, values)
    X = linear.fit_transform(filled) if rank else filled[:, :0]
    X = X[:, X.std(0) > 1e-6]  # factors without loadings have scores of zero
    extra = np.random.default_rng(seed).standard_normal((latent_dim - X.shape[1], len(X))).T
    X = np.concatenate([X, extra], axis=1)
    X = X - X.mean(0)
    X = X / np.where(len(X) > 1, X.std(0), 1.0)
    return torch.as_tensor(X).to(Y), torch.as_tensor(filled).to(Y)


@names_types
def tsne_layout(Y: Float[Tensor, "N D"], latent_dim: int = 2, *, seed: int = 0) -> Float[Tensor, "N Q"]:
    """Compute a t-SNE embedding of rows by scikit-learn, from principal components, with a perplexity of 30 or (N − 1) / 3.

    :param Y: rows without missing entries, such as those that :func:`linear_latents` imputes.
    :param latent_dim: number of dimensions, at most three, for which the Barnes-Hut approximation exists.
    :param seed: seed of scikit-learn's solver.
    :raises ValueError: for more dimensions than three, fewer rows than five, or missing entries.

    Source: van der Maaten and Hinton (2008), "Visualizing data using t-SNE".

    >>> tsne_layout(torch.randn(20, 5)).shape
    torch.Size([20, 2])
    """
    if latent_dim > MAX_TSNE_DIM:
        raise ValueError(f"expected t-SNE in at most {MAX_TSNE_DIM} dimensions, got {latent_dim}; use fewer, or PCA")
    if len(Y) < MIN_TSNE_ROWS:
        raise ValueError(f"expected {MIN_TSNE_ROWS} rows or more for t-SNE, got {len(Y)}; use PCA")
    if Y.isnan().any():
        raise ValueError("expected rows without missing entries for t-SNE, got NaN; impute them, as linear_latents(Y, 2) does")
    from sklearn.manifold import TSNE  # imported where it is used, since scikit-learn takes a second

    layout = TSNE(latent_dim, perplexity=min(30.0, (len(Y) - 1) / 3.0), init="pca", random_state=seed)
    return torch.as_tensor(layout.fit_transform(Y.numpy(force=True))).to(Y)


def _centred_rank(values: np.ndarray, most: int, seed: int) -> int:
    """Rank of the centred data, but at most ``most``, computed from ``most`` random linear combinations of columns."""
    random = np.random.default_rng(seed).standard_normal((values.shape[1], most))
    combinations = (values - values.mean(0)) @ random
    # The rounding error of the means is relative to the size of the data, not of the centred data.
    rounding = np.finfo(float).eps * max(*values.shape, most) * np.linalg.norm(values)
    return int((np.linalg.svd(combinations, compute_uv=False) > rounding).sum())


def column_moments(y: Float[Tensor, "N D"]) -> tuple[Float[Tensor, " D"], Float[Tensor, " D"]]:
    """Compute mean and standard deviation of the observed entries of each column; the latter is 1 where they do not vary.

    :param y: data, NaN where missing.

    >>> column_moments(torch.tensor([[1.0, 2.0], [3.0, torch.nan]]))
    (tensor([2., 2.]), tensor([1., 1.]))
    """
    mean = y.nanmean(0)
    scale = (y - mean).square().nanmean(0).sqrt()
    return mean, torch.where(scale > 0.0, scale, 1.0)


def kaiser_dim(Y: Float[Tensor, "N D"], *, most: int) -> int:
    """Count the eigenvalues above 1 of the correlation matrix, from 1 to ``most`` (Kaiser's rule).

    Correlations are those of the rows in which both columns are observed.

    :param Y: data, NaN where missing.
    :param most: largest result.

    >>> factor = torch.linspace(-1.0, 1.0, 9)
    >>> kaiser_dim(torch.stack([factor, -factor, 2.0 * factor], 1), most=5)
    1
    """
    values = Y.detach().cpu().double()
    observed = (~values.isnan()).double()
    z = torch.nan_to_num((values - values.nanmean(0)) / (values - values.nanmean(0)).square().nanmean(0).sqrt())
    eigenvalues = torch.linalg.eigvalsh(z.mT @ z / (observed.mT @ observed).clamp_min(1.0))
    return min(max(int((eigenvalues > 1.0 + 1e-9).sum()), 1), most)


def jointly_diagonalizing_rotation(A: Float[Tensor, "V Q Q"], *, num_sweeps: int = 50) -> Float[Tensor, "Q Q"]:
    """Compute the orthogonal R for which the sum of squares of the diagonals of all ``R^T A_v R`` is largest.

    Plane rotations by the angles of Cardoso and Souloumiac are applied to each pair of columns until none changes.

    :param A: symmetric matrices.
    :param num_sweeps: largest number of sweeps over all pairs.

    Source: Cardoso and Souloumiac (1996), "Jacobi angles for simultaneous diagonalization".

    >>> Q, _ = torch.linalg.qr(torch.randn(3, 3))
    >>> R = jointly_diagonalizing_rotation(Q @ torch.diag_embed(torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 1.0]])) @ Q.T)
    >>> torch.allclose((Q.T @ R).abs().sum(0), torch.ones(3), atol=1e-3)
    True
    """
    like, dim = A, A.shape[-1]
    A = A.detach().cpu().double()
    rotation = torch.eye(dim, dtype=torch.double)
    for _ in range(num_sweeps):
        largest = 0.0
        for p, q in combinations(range(dim), 2):
            difference, product = A[:, p, p] - A[:, q, q], 2.0 * A[:, p, q]
            cosine, sine = (difference.square() - product.square()).sum(), 2.0 * (difference * product).sum()
            angle = 0.5 * torch.atan2(sine, cosine + torch.hypot(cosine, sine))
            plane = torch.eye(dim, dtype=torch.double)
            plane[[p, q], [p, q]] = angle.cos()
            plane[p, q], plane[q, p] = -angle.sin(), angle.sin()
            A, rotation = plane.mT @ A @ plane, rotation @ plane
            largest = max(largest, abs(float(angle)))
        if largest < 1e-6:
            break
    return rotation.to(like)


@names_types
def cluster_centres(X: Float[Tensor, "N Q"], num_centres: int, *, seed: int = 0) -> Float[Tensor, "M Q"]:
    """Compute k-means centres of the rows of X, as inducing points close to the data.

    If X has fewer distinct rows than there are centres, as for binary data, random noise is added to the rows.

    :param X: rows.
    :param num_centres: number of centres M.
    :param seed: seed of scikit-learn's solver.

    >>> cluster_centres(torch.tensor([[0.0], [0.2], [5.0], [5.2]]), 2).sort(0).values
    tensor([[0.1000],
            [5.1000]])
    """
    rows = X.detach().cpu().double().numpy()
    if len(np.unique(rows, axis=0)) < num_centres:
        rows = rows + 0.1 * rows.std(0) * np.random.default_rng(seed).standard_normal(rows.shape)
    from sklearn.cluster import KMeans  # imported where it is used, since scikit-learn takes a second

    centres = KMeans(num_centres, n_init=1, random_state=seed).fit(rows).cluster_centers_
    return torch.as_tensor(centres).to(X)


@names_types
def latent_mixture(
    X: Float[Tensor, "N Q"], num_components: int = 20, *, regularization: float = 1e-4, seed: int = 0
) -> dist.MixtureSameFamily:
    """Fit a mixture of Gaussians to draws of the latents, as an estimate of the distribution of the training latents.

    As the prior in :meth:`~pyro_lvgp.models.LatentVariableModel.infer_latents` the mixture is more informative than N(0, I),
    which helps for rows with many missing entries.

    :param X: draws from the posterior of the training latents; several draws of each latent make the estimate smoother.
    :param num_components: number of Gaussians, each with a full covariance.
    :param regularization: added to the variances, in squared units of X.
    :param seed: seed of scikit-learn's EM algorithm.

    Source: Ghosh et al. (2020), "From variational to deterministic autoencoders", on density estimation after the fit.

    >>> latent_mixture(torch.randn(100, 2), 3).sample().shape
    torch.Size([2])
    """
    values = X.detach().cpu().double().numpy()
    from sklearn.mixture import GaussianMixture  # imported where it is used, since scikit-learn takes a second

    fitted = GaussianMixture(num_components, reg_covar=regularization, random_state=seed).fit(values)
    weights, means, covariances = (torch.as_tensor(x).to(X) for x in (fitted.weights_, fitted.means_, fitted.covariances_))
    return dist.MixtureSameFamily(dist.Categorical(weights), dist.MultivariateNormal(means, covariances))
