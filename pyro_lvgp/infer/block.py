"""Blocks of parameters that are updated together, and the partition of parameters into blocks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_lvgp._utils.argument_types import check_types
from pyro_lvgp.infer._parameters import Parameter

__all__ = ["Block", "Loss", "partition"]

Loss = ELBO | Callable[..., Tensor]


@dataclass(frozen=True)
class Block:
    r"""Block of parameters that are updated together, by gradient or in closed form.

    Parameters of modules have dotted names with the prefix ``model.`` or ``guide.``, as in ``"guide.locs.x"``, and those of
    functions their names in Pyro's param store.  Patterns are those of :mod:`fnmatch`: ``*`` matches dots too.

    A closed form gives new constrained values :math:`\hat\lambda`, and the update is

    .. math:: \lambda \leftarrow (1 - \rho) \lambda + \rho \hat\lambda .

    At :math:`\rho = 1` this is the closed form itself.  Let the parameters be affine in the natural parameters of a conjugate
    family, and compute :math:`\hat\lambda` from a mini-batch whose counts are scaled by N/B: then it is a step of stochastic
    natural gradients, which converges if :math:`\rho` falls like :math:`t^{-\kappa}` with κ in (½, 1].

    :param name: name of the block, in errors and states.
    :param params: patterns of parameter names.
    :param sites: names of sample sites: all guide parameters with the site's name between dots, as in
        ``guide.locs.x`` and ``guide.scales.x`` of Pyro's autoguides.
    :param optimizer: function of a list of tensors that returns a torch optimiser, for updates by gradient.
    :param num_steps: number of gradient steps in each sweep.
    :param loss: bound whose gradients update this block; by default that of the inference.
    :param update: function for an update in closed form.  It is called with the arguments of model and guide, without
        gradients, and returns the new value of every parameter of the block by name.  Values of frozen parameters are not
        needed, and not used.
    :param damping: ρ in (0, 1], or a function of the number of sweeps taken.
    :raises ValueError: for a block without parameters, with neither or both of ``optimizer`` and ``update``, with settings of
        the other, or with settings out of range.

    Source: Hoffman et al. (2013), "Stochastic variational inference", eq. 26; Robbins and Monro (1951), for ρ.

    >>> Block("kernel", params=["model.kernel.*"], optimizer=lambda tensors: torch.optim.Adam(tensors, lr=0.01)).num_steps
    1
    """

    name: str
    _: KW_ONLY
    params: Sequence[str] = ()
    sites: Sequence[str] = ()
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None
    num_steps: int = 1
    loss: Loss | None = None
    update: Callable[..., Mapping[str, Tensor]] | None = None
    damping: float | Callable[[int], float] = 1.0

    def __post_init__(self):
        if isinstance(self.params, str) or isinstance(self.sites, str) or not (self.params or self.sites):
            raise ValueError(
                f"block {self.name!r}: expected a list of patterns in params or of names in sites, got "
                f"params={self.params!r} and sites={self.sites!r}"
            )
        check_types(type(self).__init__, (self,), vars(self))
        if (self.optimizer is None) == (self.update is None):
            raise ValueError(
                f"block {self.name!r}: expected either optimizer, for gradient steps, or update, for a closed form; got "
                f"{'neither' if self.optimizer is None else 'both'}"
            )
        if self.num_steps < 1:
            raise ValueError(f"block {self.name!r}: expected num_steps of at least 1, got {self.num_steps}")
        if self.update is not None and (self.num_steps, self.loss) != (1, None):
            raise ValueError(
                f"block {self.name!r}: expected num_steps and loss for gradients alone, got them beside update; leave them out"
            )
        if self.optimizer is not None and self.damping != 1.0:
            raise ValueError(
                f"block {self.name!r}: expected no damping beside optimizer, got {self.damping!r}; set a learning rate"
            )
        if not callable(self.damping):
            self.damping_after(0)

    def damping_after(self, num_sweeps: int) -> float:
        """Return ρ of the next sweep.

        :param num_sweeps: number of sweeps taken.
        :raises ValueError: if ``damping`` returns a number outside (0, 1].
        """
        rho = self.damping(num_sweeps) if callable(self.damping) else self.damping
        if not 0.0 < rho <= 1.0:
            raise ValueError(f"block {self.name!r}: expected damping in (0, 1], got {rho}")
        return rho


def partition(blocks: Sequence[Block], parameters: Mapping[str, Parameter]) -> dict[str, dict[str, Parameter]]:
    """Assign parameters to blocks; return those of each block by its name.

    :param blocks: the blocks.
    :param parameters: all parameters by name.
    :raises ValueError: if a parameter that requires gradients is not in exactly one block, or a block matches no parameter.
    """
    members, faults = {}, []
    for block in blocks:
        matches = _matches(block, parameters)
        faults += [f"{key} of block {block.name!r} matches none" for key, names in matches.items() if not names]
        chosen = set().union(*matches.values())
        members[block.name] = {name: parameter for name, parameter in parameters.items() if name in chosen}
    faults += _not_in_one_block(members, parameters)
    if faults:
        raise ValueError(
            f"expected each parameter in exactly one block, got: {'; '.join(faults)}. Parameters: {', '.join(parameters)}; "
            "freeze parameters that are in no block by requires_grad_(False)"
        )
    return members


def _not_in_one_block(members: Mapping[str, Mapping[str, Parameter]], parameters: Mapping[str, Parameter]) -> list[str]:
    """Describe the parameters that require gradients and are in no block, then those in several."""
    trained = [name for name, parameter in parameters.items() if parameter.tensor.requires_grad]
    owners = {name: [block for block, own in members.items() if name in own] for name in trained}
    in_none = [f"{name!r} is in no block" for name, blocks in owners.items() if not blocks]
    return in_none + [f"{name!r} is in blocks {blocks}" for name, blocks in owners.items() if len(blocks) > 1]


def _matches(block: Block, parameters: Mapping[str, Parameter]) -> dict[str, set[str]]:
    """Return the names of the parameters that match each pattern and each site of a block."""
    matches = {f"pattern {key!r}": _matching(key, parameters) for key in block.params}
    for key in block.sites:
        names = {name for name, parameter in parameters.items() if parameter.of_guide and f".{key}." in f".{name}."}
        matches[f"site {key!r}"] = names
    return matches


def _matching(key: str, names: Collection[str]) -> set[str]:
    """Return the name equal to the key, which may contain brackets, if there is one, else all names that match it."""
    return {key} if key in names else {name for name in names if fnmatchcase(name, key)}
