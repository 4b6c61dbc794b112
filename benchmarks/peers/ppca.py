"""Probabilistic principal component analysis of data with missing entries, by expectation maximisation."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad


class PPCA:
    r"""Maximum likelihood of :math:`y_{nd} = w_d^T x_n + c_d + \epsilon`, with x ~ N(0, I) and one noise variance.

    It starts at the principal components of the data with gaps filled by column means.

    :param Y: data, NaN where missing; no column all missing.
    :param num_factors: length Q of x.

    Source: Tipping and Bishop (1999), "Probabilistic principal component analysis"; Ilin and Raiko (2010), "Practical
    approaches to principal component analysis in the presence of missing values".

    >>> PPCA(torch.randn(20, 4), 2).fit(10).reconstruct().shape
    torch.Size([20, 4])
    """

    def __init__(self, Y: Float[Tensor, "N D"], num_factors: int):
        self._observed = (~torch.isnan(Y)).double()
        self._y = torch.nan_to_num(Y).double()
        mean = Y.nanmean(0).double()
        filled = torch.where(torch.isnan(Y), mean, Y.double())
        _, S, Vh = torch.linalg.svd(filled - mean, full_matrices=False)
        stddev = S[:num_factors] / len(Y) ** 0.5
        self.loadings: Float[Tensor, "D Q+1"] = pad(Vh[:num_factors].mT * stddev, (0, 1))
        self.loadings[:, -1] = mean
        self.noise = ((S.square().sum() - S[:num_factors].square().sum()) / Y.numel()).clamp_min(1e-6)

    def fit(self, num_iterations: int = 100) -> "PPCA":
        """Take steps of expectation maximisation."""
        for _ in range(num_iterations):
            self._update()
        return self

    def reconstruct(self) -> Float[Tensor, "N D"]:
        """Expected data without noise, given the observed entries of their row."""
        return pad(self._latents()[0], (0, 1), value=1.0) @ self.loadings.mT

    def covariance(self) -> Float[Tensor, "D D"]:
        """Covariance of a row."""
        W = self.loadings[:, :-1]
        return W @ W.mT + self.noise * torch.eye(len(W), dtype=W.dtype)

    def _latents(self) -> tuple[Float[Tensor, "N Q"], Float[Tensor, "N Q Q"]]:
        """Mean and covariance of each x given its row."""
        W, c = self.loadings[:, :-1], self.loadings[:, -1]
        eye = torch.eye(W.shape[1], dtype=W.dtype)
        precision = (self._observed @ _outer(W).flatten(1)).unflatten(1, eye.shape)
        R = torch.linalg.cholesky(self.noise * eye + precision)
        linear = (self._observed * (self._y - c)) @ W
        return torch.cholesky_solve(linear[..., None], R).squeeze(-1), self.noise * torch.cholesky_inverse(R)

    def _update(self) -> None:
        mean, covariance = self._latents()
        one = pad(mean, (0, 1), value=1.0)
        second = pad(covariance, (0, 1, 0, 1)) + _outer(one)
        total = (self._observed.mT @ second.flatten(1)).unflatten(1, second.shape[1:])  # [D, Q + 1, Q + 1]
        linear = (self._observed * self._y).mT @ one
        self.loadings = torch.linalg.solve(total, linear)
        explained = (self.loadings[:, None] @ total @ self.loadings[..., None]).sum()
        squares = (self._observed * self._y.square()).sum() - 2.0 * (self.loadings * linear).sum() + explained
        self.noise = squares / self._observed.sum()


def _outer(x: Float[Tensor, "N Q"]) -> Float[Tensor, "N Q Q"]:
    return x[:, :, None] * x[:, None, :]
