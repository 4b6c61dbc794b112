"""Spectral mixture kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_lvgp._utils.validation import check_sizes
from pyro_lvgp.kernels._parametric import _REAL, _Parametric, _Value
from pyro_lvgp.kernels.base import KernelParams
from pyro_lvgp.kernels.spectral import mixture_kernel

__all__ = ["SpectralMixture"]


class SpectralMixture(_Parametric):
    r"""Spectral mixture kernel, whose spectral density is a mixture of Gaussians.

    .. math:: k(x, z) = \sum_c w_c \cos\big(2 \pi \mu_c^T (x - z)\big)
        \exp\Bigl(-2 \pi^2 \sum_q \sigma_{cq}^2 (x_q - z_q)^2\Bigr)

    Each component is a wave of frequency μ that loses its phase over the length 1/(2πσ).  Enough components approximate any
    stationary kernel.  The bound has many maxima in μ: give frequencies near those that the data may have.

    :param input_dim: number of columns on which the kernel acts.
    :param num_components: number C of components.
    :param weights: w, variances of the components, of shape ``batch_shape + (num_components,)``; by default 1/C.
    :param locs: μ in cycles per unit of the inputs, of shape ``batch_shape + (num_components, input_dim)``; by default
        (c − ½)/C for c = 1 … C in each column.
    :param scales: σ in cycles per unit of the inputs, of the same shape; by default 1/C.
    :param batch_shape: shape of a batch of kernels.
    :param active_dims: indices of the columns on which the kernel acts; by default all columns.
    :raises ValueError: if a weight or a scale is not positive, a frequency is not finite, or a parameter has the wrong shape.
    :raises TypeError: if ``input_dim`` or ``num_components`` is no integer.

    GPyTorch's ``SpectralMixtureKernel`` multiplies a cosine of each column; this kernel has the cosine of the sum, so that a
    component has one direction.  With one column both are the same.

    Source: Wilson and Adams (2013), "Gaussian process kernels for pattern discovery and extrapolation", eq. 12.

    >>> kernel = SpectralMixture(1, locs=torch.tensor([[0.5]]), scales=1e-3)
    >>> kernel(torch.tensor([[0.0]]), torch.tensor([[0.0], [1.0], [2.0]])).detach()
    tensor([[ 1.0000, -1.0000,  0.9999]])
    """

    weights: Tensor
    locs: Tensor
    scales: Tensor

    def __init__(
        self,
        input_dim: int,
        num_components: int = 1,
        *,
        weights: _Value | None = None,
        locs: _Value | None = None,
        scales: _Value | None = None,
        batch_shape: Sequence[int] = (),
        active_dims: Sequence[int] | None = None,
    ) -> None:
        check_sizes(input_dim=input_dim, num_components=num_components)
        share, each = 1.0 / num_components, (num_components, input_dim)
        if locs is None:
            locs = share * (torch.arange(num_components)[:, None] + 0.5)
        parameters: dict[str, tuple[_Value, tuple[int, ...]]] = {
            "weights": (share if weights is None else weights, (num_components,)),
            "scales": (share if scales is None else scales, each),
            "locs": (locs, each),
        }
        super().__init__(input_dim, batch_shape, active_dims, parameters, {"locs": _REAL})
        self.num_components, self._num_columns = num_components, input_dim

    def params(self) -> KernelParams:
        each = (self.num_components, self._num_columns)
        return self._of_shape("weights", each[:1]), self._of_shape("locs", each), self._of_shape("scales", each)

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        centre = Z.detach().mean(-2, keepdim=True)  # the phases of inputs far from zero, such as dates, would be rounded
        return mixture_kernel(X - centre, Z - centre, *params)

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        weights, locs, scales = params
        batch = torch.broadcast_shapes(X.shape[:-2], weights.shape[:-1], locs.shape[:-2], scales.shape[:-2])
        return weights.sum(-1)[..., None].expand(*batch, X.shape[-2])
