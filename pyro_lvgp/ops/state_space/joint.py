r"""Several Gauss–Markov processes under sites that couple them, in linear time.

The states of Q independent processes are one state :math:`x_n` with block-diagonal matrices, and :math:`f_n = H x_n`.  A site
:math:`\exp(h_n^T f_n - \tfrac12 f_n^T \Lambda_n f_n)` of all processes has the precision :math:`J_n = H^T \Lambda_n H` in the
state.  With predicted covariance P and mean m of the state, the site makes them :math:`F = (I + P J)^{-1} P` and
:math:`(I + P J)^{-1} (m + P H^T h)`.  No covariance is inverted, so that inputs may coincide.

Source: Särkkä and García-Fernández (2021), "Temporal parallelization of Bayesian smoothers".
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from pyro_lvgp.ops.state_space._log_normaliser import log_normaliser_of_coupled
from pyro_lvgp.ops.state_space.models import StateSpaceModel

__all__ = ["joint_log_normaliser"]


def joint_log_normaliser(
    models: Sequence[StateSpaceModel], linear: Float[Tensor, "N Q"], precision: Float[Tensor, "N Q Q"]
) -> Float[Tensor, ""]:
    """Compute ``log Z`` as :func:`pyro_lvgp.ops.joint_sites.joint_log_normaliser`, by a Kalman filter.

    :param models: models of groups of processes, of batch shapes [q] with q = Q in total, at N inputs in increasing order.
    :param linear: h of each point.
    :param precision: Λ of each point.

    >>> from pyro_lvgp.ops.state_space import matern
    >>> model = matern(torch.tensor([0.5]), torch.ones(2), torch.ones(2), 0.5)
    >>> joint_log_normaliser([model], torch.zeros(2, 2), torch.stack([torch.eye(2), torch.zeros(2, 2)]))  # −log 2
    tensor(-0.6931)
    """
    A, C = _block_diagonal([model.A for model in models]), _block_diagonal([model.Q for model in models])
    P = _block_diagonal([model.P[:, None] for model in models])
    H = _block_diagonal([model.emission[:, None, None, :] for model in models]).squeeze(0)
    J, j = H.mT @ precision @ H, (linear @ H)[..., None]
    return log_normaliser_of_coupled(P.squeeze(0), A, C, J, j).squeeze(-1)


def _block_diagonal(groups: Sequence[Float[Tensor, "_ T _ _"]]) -> Float[Tensor, "T _ _"]:
    """Block-diagonal matrices of the blocks of all processes."""
    blocks = [block for group in groups for block in group]
    widths = [block.shape[-1] for block in blocks]
    before = [sum(widths[:i]) for i in range(len(blocks))]
    rows = [F.pad(block, (left, sum(widths) - left - block.shape[-1])) for block, left in zip(blocks, before, strict=True)]
    return torch.cat(rows, -2)
