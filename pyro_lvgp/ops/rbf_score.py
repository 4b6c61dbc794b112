r"""Score of the latents of a sparse Gaussian process with Gaussian noise, under a squared exponential kernel.

With the quadratic form of :mod:`~pyro_lvgp.ops.expected_log_likelihood`, :math:`a_n = L_{uu}^{-1} k(Z, x_n)` and a Gaussian
prior of the latents, the gradient of the log joint density in :math:`x_n` is

.. math::

    s(x_n) = \sum_m c_{nm}\, k(x_n, z_m)\, \frac{z_m - x_n}{\ell^2} + r + t \odot x_n, \qquad
    c_n = L_{uu}^{-T} (b_n - H_n a_n),

where :math:`r + t \odot x` is the score of the prior.  The score takes 16 tensor operations, its vector-Jacobian product 17.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_lvgp.ops.expected_log_likelihood import Quadratic, deficit_times

__all__ = ["Bars", "Evaluated", "RBFScore", "rbf_score", "score"]


class Evaluated(NamedTuple):
    """Intermediate results of a score.

    :param x: scaled latents.
    :param K: k(x_n, z_m).
    :param a: a_n in rows.
    :param c: c_n in rows.
    :param total: Σ_m c_nm k_nm.
    :param pull: Σ_m c_nm k_nm (point_m − x_n).
    """

    X: Float[Tensor, "*batch N Q"]
    x: Float[Tensor, "*batch N Q"]
    K: Float[Tensor, "*batch N M"]
    a: Float[Tensor, "*batch N M"]
    c: Float[Tensor, "*batch N M"]
    total: Float[Tensor, "*batch N 1"]
    pull: Float[Tensor, "*batch N Q"]


class Bars(NamedTuple):
    """Derivatives of a loss by the score and by intermediate results, of which the gradients of the coefficients are sums.

    :param exponent: by the logarithm of K.
    """

    score: Float[Tensor, "*batch N Q"]
    x: Float[Tensor, "*batch N Q"]
    pull: Float[Tensor, "*batch N Q"]
    exponent: Float[Tensor, "*batch N M"]
    a: Float[Tensor, "*batch N M"]
    c: Float[Tensor, "*batch N M"]


class RBFScore(NamedTuple):
    """Coefficients of the score that do not depend on the latents, whose scaled values are ``x = X / ℓ + shift``.

    :param inverse_lengthscale: 1 / ℓ; in whitened coordinates that of each row.
    :param shift: −o / ℓ, with the mean o of the inducing points as the origin, to reduce rounding.
    :param points: (Z − o) / ℓ.
    :param offset: log σ² − ½ ‖point‖².
    :param Luu_inv: L_uu⁻¹.
    :param linear: bᵀ L_uu⁻¹, in rows.
    :param matrix: H L_uu⁻¹.
    :param deficit: (H − H_n) L_uu⁻¹ for each row, or None.
    :param intercept: r, the score of the prior at the origin.
    :param slope: t, the slope of the score of the prior.
    """

    inverse_lengthscale: Float[Tensor, "*batch #N #Q"]
    shift: Float[Tensor, "*batch #N Q"]
    points: Float[Tensor, "*batch M Q"]
    offset: Float[Tensor, "*batch 1 M"]
    Luu_inv: Float[Tensor, "*batch M M"]
    linear: Float[Tensor, "*batch N M"]
    matrix: Float[Tensor, "*batch M M"]
    deficit: Float[Tensor, "*batch N M M"] | None
    intercept: Float[Tensor, "*#batch #N #Q"]
    slope: Float[Tensor, "*#batch #N #Q"]

    def whitened(self, loc: Float[Tensor, "N Q"], scale: Float[Tensor, "N Q"]) -> "RBFScore":
        """Return the coefficients of the score of z, for latents ``loc + scale · z``.

        :param loc: mean of the base of each row.
        :param scale: standard deviations of the base of each row.
        """
        return self._replace(
            inverse_lengthscale=self.inverse_lengthscale * scale,
            shift=torch.addcmul(self.shift, self.inverse_lengthscale, loc),
            intercept=scale * torch.addcmul(self.intercept, self.slope, loc),
            slope=self.slope * scale.square(),
        )

    def evaluate(self, X: Float[Tensor, "*#batch N Q"]) -> tuple[Float[Tensor, "*batch N Q"], Evaluated]:
        """Compute the score, and the intermediate results that its derivatives need.

        :param X: latents.
        """
        x = torch.addcmul(self.shift, X, self.inverse_lengthscale)
        K = torch.sub(x @ self.points.mT + self.offset, x.square().sum(-1, keepdim=True), alpha=0.5).exp()
        a = K @ self.Luu_inv.mT
        c = self.linear - a @ self.matrix
        if self.deficit is not None:
            c = c + deficit_times(self.deficit, a)
        weight = c * K
        total = weight.sum(-1, keepdim=True)
        pull = torch.addcmul(weight @ self.points, total, x, value=-1.0)
        prior = torch.addcmul(self.intercept, self.slope, X)
        return torch.addcmul(prior, pull, self.inverse_lengthscale), Evaluated(X, x, K, a, c, total, pull)

    def tensors(self, evaluated: Sequence[Evaluated]) -> tuple[Tensor | None, ...]:
        """Return the coefficients."""
        return tuple(self)

    def pull_back(self, at: Evaluated, bar: Float[Tensor, "*batch N Q"]) -> tuple[Float[Tensor, "*batch N Q"], Bars]:
        """Compute the derivative of a loss by the latents, given that by the score.

        :param at: returned by :meth:`evaluate`.
        :param bar: derivative of the loss by the score.
        """
        pull_bar = bar * self.inverse_lengthscale
        weight_bar = pull_bar @ self.points.mT - (pull_bar * at.x).sum(-1, keepdim=True)
        c_bar = weight_bar * at.K
        a_bar = -(c_bar @ self.matrix.mT)
        if self.deficit is not None:
            a_bar = a_bar + deficit_times(self.deficit.mT, c_bar)
        exponent_bar = torch.addcmul(a_bar @ self.Luu_inv, weight_bar, at.c) * at.K
        x_bar = torch.addcmul(exponent_bar @ self.points, exponent_bar.sum(-1, keepdim=True), at.x, value=-1.0)
        x_bar = torch.addcmul(x_bar, at.total, pull_bar, value=-1.0)
        bars = Bars(bar, x_bar, pull_bar, exponent_bar, a_bar, c_bar)
        return torch.addcmul(self.slope * bar, x_bar, self.inverse_lengthscale), bars

    def gradients(self, evaluated: Sequence[Evaluated], bars: Sequence[Bars]) -> tuple[Tensor | None, ...]:
        """Compute the derivatives of a loss by the coefficients, summed over several evaluations.

        :param evaluated: intermediate results of each evaluation.
        :param bars: derivatives of the loss that :meth:`pull_back` returned for each.
        """
        at = Evaluated(*map(torch.stack, zip(*evaluated, strict=True)))
        bar = Bars(*map(torch.stack, zip(*bars, strict=True)))
        gradients = RBFScore(
            inverse_lengthscale=torch.addcmul(bar.score * at.pull, bar.x, at.X),
            shift=bar.x,
            points=_products(at.c * at.K, bar.pull, self.points) + _products(bar.exponent, at.x, self.points),
            offset=bar.exponent,
            Luu_inv=_products(bar.a, at.K, self.Luu_inv),
            linear=bar.c,
            matrix=-_products(at.a, bar.c, self.matrix),
            deficit=None if self.deficit is None else at.a.unsqueeze(-1) * bar.c.unsqueeze(-2),
            intercept=bar.score,
            slope=bar.score * at.X,
        )
        return tuple(
            None if gradient is None or own is None else gradient.sum_to_size(own.shape)
            for gradient, own in zip(gradients, self, strict=True)
        )


def rbf_score(
    form: Quadratic,
    Luu_inv: Float[Tensor, "*#batch M M"],
    Z: Float[Tensor, "M Q"],
    variance: Float[Tensor, "*#batch"],
    lengthscale: Float[Tensor, "*#batch #Q"],
    *,
    prior: tuple[Float[Tensor, "N Q"], Float[Tensor, "N Q"]] | None = None,
) -> RBFScore:
    """Compute the coefficients of the score of latents, whose prior has ``r = m / s²`` and ``t = −1 / s²``.

    :param form: coefficients of the quadratic form.
    :param Luu_inv: inverse Cholesky factor of k(Z, Z).
    :param Z: inducing points.
    :param variance: of the kernel.
    :param lengthscale: of the kernel, one for each latent dimension or for all.
    :param prior: means m and standard deviations s of the prior of each row; None for N(0, I).
    """
    inverse_lengthscale = lengthscale.reciprocal().unsqueeze(-2)
    origin = Z.detach().mean(-2, keepdim=True)
    points = (Z - origin) * inverse_lengthscale
    slope = -Z.new_ones(()) if prior is None else -prior[1].square().reciprocal()
    return RBFScore(
        inverse_lengthscale=inverse_lengthscale,
        shift=-origin * inverse_lengthscale,
        points=points,
        offset=torch.sub(variance.log()[..., None], points.square().sum(-1), alpha=0.5).unsqueeze(-2),
        Luu_inv=Luu_inv,
        linear=form.linear @ Luu_inv,
        matrix=form.matrix @ Luu_inv,
        deficit=None if form.deficit is None else form.deficit @ Luu_inv.unsqueeze(-3),
        intercept=Z.new_zeros(()) if prior is None else -slope * prior[0],
        slope=slope,
    )


def score(coefficients: RBFScore, X: Float[Tensor, "*#batch N Q"]) -> Float[Tensor, "*batch N Q"]:
    """Compute the score of latents, as one operation for autograd.

    :param coefficients: returned by :func:`rbf_score`.
    :param X: latents.

    >>> from pyro_lvgp.ops.expected_log_likelihood import gaussian_quadratic
    >>> one = torch.ones(1, 1)
    >>> form = gaussian_quadratic(one, one.bool(), torch.ones(1), torch.full((1, 1), 0.5))
    >>> coefficients = rbf_score(form, one, torch.zeros(1, 1), torch.tensor(1.0), torch.tensor([1.0]))  # f = ½ k(0, x)
    >>> score(coefficients, torch.zeros(1, 1)), score(coefficients, one)  # that of the prior is −x
    (tensor([[0.]]), tensor([[-1.5792]]))
    """
    return _Score.apply(X, *coefficients)


class _Score(Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor, *coefficients: Any) -> Tensor:
        value, ctx.evaluated = RBFScore(*coefficients).evaluate(X)
        ctx.save_for_backward(*coefficients)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, bar: Tensor) -> tuple[Tensor | None, ...]:
        coefficients = RBFScore(*ctx.saved_tensors)
        X_bar, bars = coefficients.pull_back(ctx.evaluated, bar)
        return X_bar.sum_to_size(ctx.evaluated.X.shape), *coefficients.gradients([ctx.evaluated], [bars])


def _products(left: Tensor, right: Tensor, own: Tensor) -> Tensor:
    """Compute leftᵀ right, the derivative by a matrix; one without batches gets the sum over all rows."""
    if own.dim() == 2:
        left, right = left.flatten(0, -2), right.flatten(0, -2)
    return left.mT @ right
