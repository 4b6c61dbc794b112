"""A block of parameters that move together, and how a model's and a guide's parameters are shared out to blocks."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_lvgp.infer._parameters import Parameter

Loss = ELBO | Callable[..., Tensor]


@dataclass(frozen=True)
class Block:
    r"""Parameters that move together, by gradient or in closed form.

    Parameters of modules go by dotted names with ``model.`` or ``guide.`` in front, as in ``"guide.locs.x"``; those of
    functions by their names in Pyro's param store.  Patterns are those of :mod:`fnmatch`: ``*`` matches dots too.

    A closed form gives new constrained values :math:`\hat\lambda`, and the block moves to

    .. math:: \lambda \leftarrow (1 - \rho) \lambda + \rho \hat\lambda .

    At :math:`\rho = 1` this is the closed form itself.  Let the parameters be affine in the natural parameters of a conjugate
    family, and compute :math:`\hat\lambda` from a mini-batch whose counts are scaled by N/B: then it is a step of stochastic
    natural gradients, which converges if :math:`\rho` falls like :math:`t^{-\kappa}` with κ in (½, 1].

    :param name: of the block, in errors and states.
    :param params: patterns of parameter names.
    :param sites: names of sample sites: all guide parameters with the site's name between dots, as in
        ``guide.locs.x`` and ``guide.scales.x`` of Pyro's autoguides.
    :param optim: makes a torch optimiser of a list of tensors, to move the block by gradient.
    :param num_steps: gradient steps in each sweep.
    :param schedule: maps the number of sweeps taken to a factor on the learning rates of the optimiser.
    :param loss: bound of these gradients; that of the inference by default.
    :param update: called with the arguments of model and guide, without gradients, it returns the new value of every
        parameter of the block by its name, to move the block in closed form; values of frozen ones may be there, and are not
        used.
    :param damping: ρ in (0, 1], or a function of the number of sweeps taken.
    :raises ValueError: for a block without parameters, with neither or both of ``optim`` and ``update``, with settings of
        the other, or with settings out of range.

    Source: Hoffman et al. (2013), "Stochastic variational inference", eq. 26; Robbins and Monro (1951), for ρ.

    >>> Block("kernel", params=["model.kernel.*"], optim=lambda tensors: torch.optim.Adam(tensors, lr=0.01)).num_steps
    1
    """

    name: str
    _: KW_ONLY
    params: Sequence[str] = ()
    sites: Sequence[str] = ()
    optim: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None
    num_steps: int = 1
    schedule: Callable[[int], float] | None = None
    loss: Loss | None = None
    update: Callable[..., Mapping[str, Tensor]] | None = None
    damping: float | Callable[[int], float] = 1.0

    def __post_init__(self):
        if isinstance(self.params, str) or isinstance(self.sites, str) or not (self.params or self.sites):
            raise ValueError(
                f"block {self.name!r}: expected a list of patterns in params or of names in sites, got "
                f"params={self.params!r} and sites={self.sites!r}"
            )
        if (self.optim is None) == (self.update is None):
            raise ValueError(
                f"block {self.name!r}: expected either optim, to move by gradient, or update, to move in closed form; got "
                f"{'neither' if self.optim is None else 'both'}"
            )
        if self.num_steps < 1:
            raise ValueError(f"block {self.name!r}: expected num_steps of at least 1, got {self.num_steps}")
        if self.update is not None and (self.num_steps, self.schedule, self.loss) != (1, None, None):
            raise ValueError(
                f"block {self.name!r}: num_steps, schedule and loss are for gradients; leave them out beside update"
            )
        if self.optim is not None and self.damping != 1.0:
            raise ValueError(f"block {self.name!r}: damping is for update; beside optim, set a learning rate")
        if not callable(self.damping):
            self.damping_after(0)

    def damping_after(self, num_sweeps: int) -> float:
        """ρ of the sweep that follows so many.

        :param num_sweeps: sweeps taken.
        :raises ValueError: if ``damping`` gives none in (0, 1].
        """
        rho = self.damping(num_sweeps) if callable(self.damping) else self.damping
        if not 0.0 < rho <= 1.0:
            raise ValueError(f"block {self.name!r}: expected damping in (0, 1], got {rho}")
        return rho


def partition(blocks: Sequence[Block], parameters: Mapping[str, Parameter]) -> dict[str, dict[str, Parameter]]:
    """Parameters of each block, which must share out all that are not frozen."""
    owners: dict[str, list[str]] = {name: [] for name in parameters}
    faults = []
    for block in blocks:
        chosen = {f"pattern {key!r}": _matching(key, parameters) for key in block.params}
        for key in block.sites:
            names = {name for name, parameter in parameters.items() if parameter.of_guide and f".{key}." in f".{name}."}
            chosen[f"site {key!r}"] = names
        faults += [f"{key} of block {block.name!r} fits none" for key, names in chosen.items() if not names]
        for name in set().union(*chosen.values()):
            owners[name].append(block.name)
    to_share = {name: found for name, found in owners.items() if parameters[name].tensor.requires_grad}
    faults += [f"{name!r} is in no block" for name, found in to_share.items() if not found]
    faults += [f"{name!r} is in blocks {found}" for name, found in to_share.items() if len(found) > 1]
    if faults:
        raise ValueError(
            f"expected each parameter in exactly one block, got: {'; '.join(faults)}. Parameters: {', '.join(parameters)}; "
            "requires_grad_(False) keeps others out"
        )
    return {block.name: {name: parameters[name] for name in owners if block.name in owners[name]} for block in blocks}


def _matching(key: str, names: Collection[str]) -> set[str]:
    """The name itself if there is one, brackets and all, else what the pattern fits."""
    return {key} if key in names else {name for name in names if fnmatchcase(name, key)}
