"""Variational inference one block of parameters at a time."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from jaxtyping import Float
from pyro import poutine
from pyro.infer import TraceMeanField_ELBO
from pyro.infer.util import torch_item
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_bound
from pyro_lvgp.infer._parameters import Parameter, find_parameters, held, unconstrained
from pyro_lvgp.infer.block import Block, Loss, partition
from pyro_lvgp.infer.elbo.handlers import EvaluateBound


class BlockCoordinateVI:
    """Climb a bound block by block, each by gradient or in closed form.

    It takes the place of Pyro's ``SVI``: any model, any guide, any ELBO.  A sweep visits the blocks in order.  A block that
    moves by gradient has an optimiser of its own, and nothing else requires gradients while it moves.

    The first step runs guide and model once to find their parameters.  Each that requires gradients must be in exactly one
    block; ``requires_grad_(False)`` holds a parameter fixed, then or later, and a block left without others is passed over.
    One that model and guide share goes by its name in the model.

    :param model: a Pyro model.
    :param guide: a Pyro guide.
    :param blocks: the blocks, in the order of a sweep.
    :param loss: the bound to climb, ``TraceMeanField_ELBO()`` by default, which takes no discrete sites of a guide; or, as
        for ``SVI``, a function of model, guide and their arguments that returns minus a bound, to differentiate.
    :param check_updates: evaluate the loss before and after each closed form, with the same random numbers: once (True) for an
        exact loss, which no exact closed form raises; or this many times for a loss estimated by draws, whose mean must not
        rise by more than four standard errors.
    :raises ValueError: if there are no blocks or two of one name; at the first step, if parameters are in no block or in
        several, or a block names none.
    :raises TypeError: for what is no block, or a class of bounds in place of a bound; at the first step, if ``optim`` of a
        block makes no torch optimiser.

    Source: Blei, Kucukelbir and McAuliffe (2017), "Variational inference: a review for statisticians", section 2.4.

    >>> import pyro
    >>> import pyro.distributions as dist
    >>> def model(y):
    ...     loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
    >>> def guide(y):
    ...     mean, precision = pyro.param("mean", torch.tensor(0.0)), pyro.param("precision", torch.tensor(1.0))
    ...     pyro.sample("loc", dist.Normal(mean, precision.rsqrt()))
    >>> def posterior(y):
    ...     return {"precision": torch.tensor(1.0 + len(y))}
    >>> blocks = [
    ...     Block("mean", params=["mean"], optim=lambda tensors: torch.optim.SGD(tensors, lr=0.25)),
    ...     Block("precision", params=["precision"], update=posterior),
    ... ]
    >>> vi = BlockCoordinateVI(model, guide, blocks)
    >>> loss = vi.step(torch.ones(3))
    >>> pyro.param("precision")
    tensor(4., requires_grad=True)
    """

    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        blocks: Sequence[Block],
        *,
        loss: Loss | None = None,
        check_updates: int = False,
    ):
        if others := [type(block).__name__ for block in blocks if not isinstance(block, Block)]:
            raise TypeError(f"expected blocks, each a Block(...), got {others}")
        if isinstance(loss, type):
            raise TypeError(f"expected a bound, got the class {loss.__name__}; pass {loss.__name__}()")
        names = [block.name for block in blocks]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"expected blocks, each with a name of its own, got names {names}")
        self.model, self.guide, self.blocks = model, guide, tuple(blocks)
        self.loss: Any = TraceMeanField_ELBO() if loss is None else loss
        self.check_updates = int(check_updates)
        self._members: dict[str, dict[str, Parameter]] = {}
        self._tensors: set[Tensor] = set()
        self._unshared: dict[str, Tensor] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._waiting: Mapping[str, Any] = {}
        self._num_sweeps = 0

    def step(self, *args, **kwargs) -> float:
        """One sweep through the blocks.

        :param args: arguments of model and guide.
        :returns: minus an estimate of the bound, as ``SVI.step``: the loss of the sweep's first gradient step on it, before
            that step.  Where no block takes one, the loss before the sweep, which costs an evaluation.
        :raises ValueError: if an update returns other names, shapes or values than the parameters of its block can take, or if
            the bound of a gradient is NaN, before anything is moved by it.
        :raises TypeError: if it returns no tensors by name.
        :raises RuntimeError: if ``check_updates`` is set and an update raises the loss, or if parameters were added, replaced
            or, without a block to move them, freed since the first step.
        """
        if not self._members:
            self._start(args, kwargs)
        if stray := [name for name, tensor in self._unshared.items() if tensor.requires_grad]:
            raise RuntimeError(
                f"expected {stray} to stay held, as at the first step, since they are not in exactly one block; make a new "
                "BlockCoordinateVI in which they are"
            )
        climbing = {name for name, own in self._optimizers.items() if any(tensor.requires_grad for tensor in _tensors_of(own))}
        by_the_way = any(block.name in climbing and block.loss is None for block in self.blocks)
        losses = [] if by_the_way else [self.evaluate_loss(*args, **kwargs)]
        for block in self.blocks:
            if block.update is not None:
                self._solve(block, args, kwargs)
            elif block.name in climbing:
                value = self._climb(block, block.loss or self.loss, args, kwargs)
                losses += [value] if block.loss is None else []
        self._num_sweeps += 1
        return losses[0]

    def evaluate_loss(self, *args, **kwargs) -> float:
        """Minus an estimate of the bound, without gradients.

        :param args: arguments of model and guide.
        """
        with torch.no_grad(), self._watched():
            loss = getattr(self.loss, "loss", self.loss)
            return torch_item(loss(self.model, self.guide, *args, **kwargs))

    def state_dict(self) -> dict[str, Any]:
        """Copies of the optimisers' states, and how many sweeps; parameters are in model, guide and Pyro's param store."""
        states = {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()}
        return {"num_sweeps": self._num_sweeps, "optimizers": deepcopy({**self._waiting, **states})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; before the first step, optimisers take their states when they are made.

        :param state: what :meth:`state_dict` returned.
        :raises ValueError: for states of other blocks.
        """
        known = {block.name for block in self.blocks if block.optim is not None}
        if not state["optimizers"].keys() <= known:
            raise ValueError(f"expected states of the blocks {sorted(known)}, got those of {sorted(state['optimizers'])}")
        # Optimisers would move what they are given.
        self._num_sweeps, self._waiting = state["num_sweeps"], deepcopy(state["optimizers"])
        self._restore()

    def _restore(self) -> None:
        for name, optimizer in self._optimizers.items():
            if name in self._waiting:
                optimizer.load_state_dict(self._waiting[name])

    def _start(self, args: tuple, kwargs: dict[str, Any]) -> None:
        parameters = find_parameters(self.model, self.guide, args, kwargs)
        members = partition(self.blocks, parameters)
        self._tensors = {parameter.tensor for parameter in parameters.values()}
        owned = Counter(name for own in members.values() for name in own)
        self._unshared = {name: parameter.tensor for name, parameter in parameters.items() if owned[name] != 1}
        for block in self.blocks:
            # Those that are held too: they may be freed later, and optimisers leave alone what has no gradient.
            tensors = [parameter.tensor for parameter in members[block.name].values()]
            if block.optim is not None and tensors:
                optimizer = block.optim(tensors)
                if not isinstance(optimizer, torch.optim.Optimizer):
                    raise TypeError(
                        f"block {block.name!r}: expected optim to make a torch optimiser of tensors, got "
                        f"{type(optimizer).__name__}; pass optim=lambda tensors: torch.optim.Adam(tensors, lr=0.01), say"
                    )
                self._optimizers[block.name] = optimizer
        self._restore()
        self._members = members  # last: what failed before is made again at the next step

    def _climb(self, block: Block, loss: Any, args: tuple, kwargs: dict[str, Any]) -> float:
        """Take gradient steps, and return the loss before the first."""
        optimizer = self._optimizers[block.name]
        if block.schedule is not None:
            factor = block.schedule(self._num_sweeps)
            for group in optimizer.param_groups:  # where torch's schedulers keep the initial rate, so that states have it
                group["lr"] = factor * group.setdefault("initial_lr", group["lr"])
        loss_and_grads = getattr(loss, "loss_and_grads", loss)

        def closure() -> float:
            optimizer.zero_grad()
            with self._watched():
                value = loss_and_grads(self.model, self.guide, *args, **kwargs)
            number = torch_item(value)
            check_bound(number)
            if isinstance(value, Tensor) and value.requires_grad:
                value.backward()
            return number

        with held(self._tensors - _tensors_of(optimizer)):
            try:
                losses = [optimizer.step(closure) for _ in range(block.num_steps)]
            finally:
                optimizer.zero_grad()
        return losses[0]

    def _solve(self, block: Block, args: tuple, kwargs: dict[str, Any]) -> None:
        """Move to the values of the closed form, or part of the way."""
        assert block.update is not None
        members = self._members[block.name]
        movable = {name for name, parameter in members.items() if parameter.tensor.requires_grad}
        if not movable:
            return
        before = self._comparable_losses(args, kwargs)
        rho = block.damping_after(self._num_sweeps)
        with torch.no_grad():
            values = block.update(*args, **kwargs)
            if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
                raise TypeError(f"block {block.name!r}: expected update to return tensors by name, got {values!r}")
            if not movable <= values.keys() <= members.keys():
                raise ValueError(
                    f"block {block.name!r}: expected update to return values of {sorted(members)}, got {sorted(values)}"
                )
            # The values may be the parameters themselves: compute all before writing any.
            moved = {name: members[name].towards(values[name], rho, name) for name in movable}
            for name, value in moved.items():
                members[name].tensor.copy_(value)
        if self.check_updates:
            rise = self._comparable_losses(args, kwargs) - before
            error = rise.std() / self.check_updates**0.5 if self.check_updates > 1 else 0.0
            eps = max(torch.finfo(parameter.tensor.dtype).eps for parameter in members.values())
            if not rise.mean() <= 4.0 * error + eps ** (2 / 3) * (1.0 + before.mean().abs()):
                raise RuntimeError(
                    f"the update of block {block.name!r} raised the loss from {before.mean()} to {(before + rise).mean()}: it "
                    "is not the closed form, or the loss is an estimate: take one without noise, or check_updates=100, say"
                )

    def _comparable_losses(self, args: tuple, kwargs: dict[str, Any]) -> Float[Tensor, " checks"]:
        def loss(seed: int) -> float:
            with seeded(seed):
                return self.evaluate_loss(*args, **kwargs)

        return torch.tensor([loss(seed) for seed in range(self.check_updates)], dtype=torch.float64)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Run a bound; raise if parameters turn up that are in no block."""
        with EvaluateBound(), poutine.trace(param_only=True) as capture:
            try:
                yield
            except NotImplementedError as error:
                if "reparameterized" in str(error):
                    error.add_note("Pass loss=Trace_ELBO() or TraceEnum_ELBO(), which take guides with discrete sites.")
                raise
        sites = capture.trace.nodes.items() if self._tensors else ()
        if new := [name for name, site in sites if unconstrained(site) not in self._tensors]:
            raise RuntimeError(
                f"expected the parameters of the first step, got new tensors for {new}: after loading Pyro's param store or "
                "adding parameters, make a new BlockCoordinateVI"
            )


def _tensors_of(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    return {tensor for group in optimizer.param_groups for tensor in group["params"]}
