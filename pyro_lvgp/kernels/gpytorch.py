"""Adapter of GPyTorch kernels."""

import sys
from copy import deepcopy
from typing import Any

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_lvgp.kernels.base import Kernel, KernelParams, format_numbers
from pyro_lvgp.networks.pyro_module import adopt

__all__ = ["as_kernel"]


def as_kernel(kernel: object) -> Kernel:
    """Adapt a GPyTorch kernel; a kernel of this library is returned as it is.

    The GPyTorch parameters become Pyro parameters, which SVI trains like all others; the kernel is changed in place.  Priors
    registered with the GPyTorch kernel are ignored, and priors by ``PyroSample`` raise an error.  The result can be neither
    compiled nor captured in a CUDA graph.

    :param kernel: a :class:`Kernel`, or a ``gpytorch.kernels.Kernel``.
    :raises TypeError: if it is neither, or a GPyTorch kernel made of a :class:`Kernel`.

    A GPyTorch kernel, ``as_kernel(gpytorch.kernels.RQKernel(ard_num_dims=2))``, is called as any other kernel is:

    >>> from pyro_lvgp.kernels import RBF
    >>> kernel = as_kernel(RBF(2))
    >>> kernel(torch.randn(5, 10, 2), torch.randn(3, 2)).shape
    torch.Size([5, 10, 3])
    """
    if isinstance(kernel, Kernel):
        return kernel
    # GPyTorch is an optional dependency; a caller with a GPyTorch kernel has imported it already.
    gpytorch = sys.modules.get("gpytorch")
    if gpytorch is not None and isinstance(kernel, gpytorch.kernels.Kernel):
        if ours := [type(part).__name__ for part in kernel.modules() if isinstance(part, Kernel)]:
            raise TypeError(
                f"expected a GPyTorch kernel of parts from GPyTorch, got {type(kernel).__name__} with {ours[0]} of "
                "pyro_lvgp.kernels in it; combine them as kernels of this library, as in as_kernel(theirs) + RBF(2)"
            )
        return _GPyTorchKernel(kernel)
    # The module's name is shown too, since kernels of other libraries have the same class names.
    got = f"a {type(kernel).__module__}.{type(kernel).__name__}" if isinstance(kernel, nn.Module) else repr(kernel)
    raise TypeError(
        f"expected a kernel of pyro_lvgp.kernels or of GPyTorch, such as RBF(2), got {got}; "
        "for another covariance function subclass pyro_lvgp.kernels.Kernel."
    )


class _GPyTorchKernel(Kernel):
    """Kernel whose covariance function is that of a GPyTorch kernel.

    :param kernel: a ``gpytorch.kernels.Kernel``.
    """

    def __init__(self, kernel: Any) -> None:
        super().__init__(batch_shape=kernel.batch_shape)
        for constraint in kernel.constraints():  # a copy of its softplus, which GPyTorch shares between all kernels
            constraint._modules.update(deepcopy(constraint._modules))
        adopt(self, "kernel", kernel)

    def params(self) -> KernelParams:
        if drawn := [name for part in self.kernel.modules() if isinstance(part, PyroModule) for name in part._pyro_samples]:
            raise ValueError(
                f"expected a GPyTorch kernel without PyroSample, got priors on {drawn}, which would be drawn anew at each "
                "read; use a kernel of pyro_lvgp.kernels, or a PyroParam"
            )
        return ()

    def k(self, X: Tensor, Z: Tensor, params: KernelParams) -> Tensor:
        batch = torch.broadcast_shapes(X.shape[:-2], Z.shape[:-2])
        return self.kernel(X.expand(*batch, *X.shape[-2:]), Z.expand(*batch, *Z.shape[-2:])).to_dense()

    def k_diagonal(self, X: Tensor, params: KernelParams) -> Tensor:
        return self.kernel(X).diagonal(dim1=-1, dim2=-2)

    def parameters_text(self) -> str:
        texts = []
        for stored, raw in self.kernel.named_parameters():
            name = stored.removesuffix("_unconstrained")
            constraint = self.kernel.constraint_for_parameter_name(name)
            texts.append(
                f"{name.replace('raw_', '')}={format_numbers(raw if constraint is None else constraint.transform(raw))}"
            )
        return ", ".join(texts)
