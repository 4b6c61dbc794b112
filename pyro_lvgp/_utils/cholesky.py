"""Cholesky factorization with the jitter that rounding makes necessary."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp._utils.argument_types import names_types
from pyro_lvgp._utils.control_flow import holds

__all__ = ["FIRST_JITTER", "NotPositiveDefiniteError", "safe_cholesky"]

FIRST_JITTER = {torch.float64: 1e-8, torch.float32: 1e-5}
_NUM_TRIES = 5


class NotPositiveDefiniteError(ValueError):
    """A covariance matrix has no Cholesky factor, even with the largest jitter allowed."""


@names_types
def safe_cholesky(
    K: Float[Tensor, "*batch M M"],
    *,
    jitter: float | None = None,
    name: str = "covariance",
    describe: Callable[[], str] | None = None,
) -> Float[Tensor, "*batch M M"]:
    """Compute the lower Cholesky factor of ``K`` plus the smallest jitter that makes it positive definite.

    Jitter is relative to the mean of the diagonal, or absolute for a matrix of zeros, such as that of a linear kernel at the
    origin.  It starts at ``jitter`` and grows tenfold, for the matrices of the
    batch that fail and for no others, at most four times.

    :param K: symmetric matrices.
    :param jitter: first jitter; 1e-8 in float64 and 1e-5 in float32 by default.  If it is 0, the default is the next.
    :param name: name of the matrix in errors.
    :param describe: function that returns the parameters of the kernel as a text, for errors.
    :raises NotPositiveDefiniteError: if ``K`` holds a NaN or infinity, or the largest jitter does not suffice.

    >>> safe_cholesky(torch.ones(2, 2, dtype=torch.float64)).shape
    torch.Size([2, 2])
    """
    smallest = FIRST_JITTER.get(K.dtype, 1e-5)
    first = smallest if jitter is None else jitter
    scale = K.diagonal(dim1=-2, dim2=-1).mean(-1)
    scale = torch.where(scale == 0.0, 1.0, scale)
    eps = torch.full_like(scale, first)
    for attempt in range(_NUM_TRIES):
        has_jitter = attempt > 0 or first != 0.0
        jittered = K + torch.diag_embed((eps * scale)[..., None].expand(K.shape[:-1])) if has_jitter else K
        L, info = torch.linalg.cholesky_ex(jittered)
        failed = info > 0
        if holds(~failed.any()):
            return L
        eps = torch.where(failed, (10 * eps).clamp_min(smallest), eps)
    at = f" at {describe()}" if describe is not None else ""
    if not torch.isfinite(K).all():
        raise NotPositiveDefiniteError(
            f"Cholesky of {name} [{_shape(K)}]{at}: expected finite entries, got NaN or infinity. "
            "Try a smaller learning rate, and check the inputs of the kernel for NaN."
        )
    raise NotPositiveDefiniteError(
        f"Cholesky of {name} [{_shape(K)}]{at}: expected a positive definite matrix, but it is not even with jitter "
        f"{float(eps.max()) / 10:.0e} times its mean diagonal. Try float64, fewer or more distinct points, shorter "
        "lengthscales, or a larger jitter."
    )


def _shape(K: Tensor) -> str:
    return " × ".join(map(str, K.shape))
