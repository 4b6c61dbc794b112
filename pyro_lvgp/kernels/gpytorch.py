"""GPyTorch's kernels as kernels of this library."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from pyro_lvgp.kernels.base import Kernel, Params, _numbers
from pyro_lvgp.networks.pyro_module import adopt


def as_kernel(kernel: object) -> Kernel:
    """Adapt a GPyTorch kernel; a kernel of this library is returned as it is.

    The GPyTorch parameters become Pyro parameters, trained by SVI like any other; the kernel is changed in place.  Priors
    registered with the GPyTorch kernel are ignored, those by ``PyroSample`` refused, and the result can be neither compiled
    nor captured in a CUDA graph.

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
    # By name, because GPyTorch is an optional dependency.
    if isinstance(kernel, nn.Module) and any(
        (base.__module__, base.__name__) == ("gpytorch.kernels.kernel", "Kernel") for base in type(kernel).__mro__
    ):
        if ours := [type(part).__name__ for part in kernel.modules() if isinstance(part, Kernel)]:
            raise TypeError(
                f"expected a GPyTorch kernel of parts from GPyTorch, got {type(kernel).__name__} with {ours[0]} of "
                "pyro_lvgp.kernels in it; combine them as kernels of this library, as in as_kernel(theirs) + RBF(2)"
            )
        return _GPyTorchKernel(kernel)
    # Other libraries have kernels of the same names.
    got = f"a {type(kernel).__module__}.{type(kernel).__name__}" if isinstance(kernel, nn.Module) else repr(kernel)
    raise TypeError(
        f"expected a kernel of pyro_lvgp.kernels or of GPyTorch, such as RBF(2), got {got}; "
        "for another covariance function subclass pyro_lvgp.kernels.Kernel."
    )


class _GPyTorchKernel(Kernel):
    def __init__(self, kernel: Any) -> None:
        super().__init__(batch_shape=kernel.batch_shape)
        for constraint in kernel.constraints():  # all kernels share a default's softplus, which must stay what it is
            constraint._modules.update(deepcopy(constraint._modules))
        adopt(self, "kernel", kernel)

    def params(self) -> Params:
        if drawn := [name for part in self.kernel.modules() for name in getattr(part, "_pyro_samples", ())]:
            raise ValueError(
                f"expected a GPyTorch kernel without PyroSample, got priors on {drawn}, which would be drawn at each look; "
                "take a kernel of pyro_lvgp.kernels, or a PyroParam"
            )
        return ()

    def _covariance(self, X: Tensor, Z: Tensor, params: Params) -> Tensor:
        batch = torch.broadcast_shapes(X.shape[:-2], Z.shape[:-2])
        return self.kernel(X.expand(*batch, *X.shape[-2:]), Z.expand(*batch, *Z.shape[-2:])).to_dense()

    def _diagonal(self, X: Tensor, params: Params) -> Tensor:
        return self.kernel(X).diagonal(dim1=-1, dim2=-2)

    def _parameters_text(self) -> str:
        texts = []
        for stored, raw in self.kernel.named_parameters():
            name = stored.removesuffix("_unconstrained")
            constraint = self.kernel.constraint_for_parameter_name(name)
            texts.append(f"{name.replace('raw_', '')}={_numbers(raw if constraint is None else constraint.transform(raw))}")
        return ", ".join(texts)
