"""Different kernels as one batch."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_lvgp.kernels.base import Combination, Theta
from pyro_lvgp.state_space import Chain, pad


class Stack(Combination):
    """Different kernels as one batch: ``k_q(x, z)``, q = 1 … Q, one process or function each.

    Points ``[*batch, 1, N, P]``, or ``[N, P]``, give matrices ``[*batch, Q, N, M]``.

    :param kernels: kernels, each with batch shape ``()``, which counts once, or ``(q,)``.
    :raises ValueError: if a kernel has another batch shape, a batch of points has no dimension of size 1 for it, or a sum or
        product has run in a model.

    >>> from pyro_lvgp.kernels import RBF, Periodic
    >>> kernel = Stack(RBF(1, batch_shape=(2,)), RBF(1) * Periodic(1))
    >>> kernel(torch.randn(10, 1)).shape
    torch.Size([3, 10, 10])
    """

    def _joint_batch_shape(self, shapes: list[torch.Size]) -> Sequence[int]:
        if any(len(shape) > 1 for shape in shapes):
            raise ValueError(f"expected kernels of batch shape () or (q,), got {list(map(tuple, shapes))}; stack simpler ones")
        return (sum(shape.numel() for shape in shapes),)

    def _covariance(self, X: Tensor, Z: Tensor, theta: Theta) -> Tensor:
        return self._concatenate(self._covariances(X, Z, theta), 2)

    def _diagonal(self, X: Tensor, theta: Theta) -> Tensor:
        return self._concatenate(self._diagonals(X, theta), 1)

    def chain(self, steps: Float[Tensor, "*#batch T"], theta: Theta) -> Chain:
        chains = self._chains(steps, theta)
        size = max(chain.h.shape[-1] for chain in chains)
        P, A, Q, h = zip(*(pad(chain, size) for chain in chains), strict=True)
        return Chain(self._concatenate(P, 2), self._concatenate(A, 3), self._concatenate(Q, 3), self._concatenate(h, 1))

    def _concatenate(self, parts: Sequence[Tensor], event_dim: int) -> Tensor:
        """Along the dimension left of the event, [*batch, q, *event] each, where one without it counts once."""
        parts = [part if part.dim() > event_dim else part.unsqueeze(0) for part in parts]
        batch = torch.broadcast_shapes(*(part.shape[: -event_dim - 1] for part in parts))
        stack = torch.cat([part.expand(*batch, *part.shape[-event_dim - 1 :]) for part in parts], -event_dim - 1)
        if (got := stack.shape[-event_dim - 1]) != (expected := self.batch_shape[0]):
            raise ValueError(
                f"expected {expected} kernels, got {got} from a batch of points or parameters; give points as "
                "X.unsqueeze(-3), and kernels that have priors batch_shape=(1,)"
            )
        return stack
