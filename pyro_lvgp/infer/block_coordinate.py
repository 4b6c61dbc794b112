"""Variational inference one block of parameters at a time."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from jaxtyping import Float
from pyro import poutine
from pyro.infer import ELBO, TraceMeanField_ELBO
from pyro.infer.util import torch_item
from torch import Tensor

from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_bound
from pyro_lvgp.infer._parameters import Parameter, find_parameters, unconstrained, without_gradients
from pyro_lvgp.infer.block import Block, Loss, partition
from pyro_lvgp.infer.elbo.handlers import EvaluateBound

__all__ = ["BlockCoordinateVI"]


class BlockCoordinateVI:
    """Maximise a bound block by block, each by gradient or in closed form.

    It takes the place of Pyro's ``SVI``: any model, any guide, any ELBO.  A sweep visits the blocks in order.  A block that
    moves by gradient has an optimiser of its own, and no other parameter requires gradients while it moves.

    The first step runs guide and model once to find their parameters.  Each that requires gradients must be in exactly one
    block; ``requires_grad_(False)`` freezes a parameter, then or later, and a block whose parameters are all frozen is
    skipped. A parameter that model and guide share goes by its name in the model.

    ``parameters`` has the unconstrained tensors used so far, by their names in Pyro's param store, and ``optimizers`` the
    torch optimisers of the blocks, by the block's name.

    :param model: a Pyro model.
    :param guide: a Pyro guide.
    :param blocks: the blocks, in the order of a sweep.
    :param loss: the bound to maximise, ``TraceMeanField_ELBO()`` by default, which takes no discrete sites of a guide; or, as
        for ``SVI``, a function of model, guide and their arguments that returns minus a bound, to differentiate.
    :param check_updates: evaluate the loss before and after each closed form, with the same random numbers: once (True) for an
        exact loss, which no exact closed form raises; or this many times for a loss estimated by draws, whose mean must not
        rise by more than four standard errors.
    :raises ValueError: if there are no blocks or two of one name; at the first step, if parameters are in no block or in
        several, or a block names none.
    :raises TypeError: for what is no block, or a class of bounds in place of a bound; at the first step, if ``optimizer``
        of a block makes no torch optimiser.

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
    ...     Block("mean", params=["mean"], optimizer=lambda tensors: torch.optim.SGD(tensors, lr=0.25)),
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
        self.parameters: dict[str, Tensor] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._members: dict[str, dict[str, Parameter]] = {}
        self._tensors: set[Tensor] = set()
        self._frozen: dict[str, Tensor] = {}
        self._waiting: Mapping[str, Any] = {}
        self._num_sweeps = 0

    def step(self, *args, **kwargs) -> float:
        """Sweep through the blocks once.

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
        if freed := [name for name, tensor in self._frozen.items() if tensor.requires_grad]:
            raise RuntimeError(
                f"expected {freed} to stay frozen, as at the first step, since they are not in exactly one block; make a new "
                "BlockCoordinateVI in which they are"
            )
        trained = {name for name, own in self.optimizers.items() if any(tensor.requires_grad for tensor in _tensors_of(own))}
        is_evaluated = any(block.name in trained and block.loss is None for block in self.blocks)
        losses = [] if is_evaluated else [self.evaluate_loss(*args, **kwargs)]
        for block in self.blocks:
            if block.update is not None:
                self._solve(block, args, kwargs)
            elif block.name in trained:
                value = self._take_gradient_steps(block, block.loss or self.loss, args, kwargs)
                losses += [value] if block.loss is None else []
        self._num_sweeps += 1
        return losses[0]

    def evaluate_loss(self, *args, **kwargs) -> float:
        """Minus an estimate of the bound, without gradients.

        :param args: arguments of model and guide.
        """
        with torch.no_grad(), self._checked():
            is_bound = isinstance(self.loss, ELBO)
            loss = self.loss.loss if is_bound else self.loss
            return torch_item(loss(self.model, self.guide, *args, **kwargs))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the optimisers' states and the number of sweeps; parameters are in model, guide or param store."""
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {"num_sweeps": self._num_sweeps, "optimizers": deepcopy({**self._waiting, **states})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; before the first step, optimisers take their states when they are made.

        :param state: returned by :meth:`state_dict`.
        :raises ValueError: for states of other blocks.
        """
        known = {block.name for block in self.blocks if block.optimizer is not None}
        if not state["optimizers"].keys() <= known:
            raise ValueError(f"expected states of the blocks {sorted(known)}, got those of {sorted(state['optimizers'])}")
        # Optimisers move the tensors of their states.
        self._num_sweeps, self._waiting = state["num_sweeps"], deepcopy(state["optimizers"])
        self._restore()

    def _restore(self) -> None:
        for name, optimizer in self.optimizers.items():
            if name in self._waiting:
                optimizer.load_state_dict(self._waiting[name])

    def _start(self, args: tuple, kwargs: dict[str, Any]) -> None:
        parameters = find_parameters(self.model, self.guide, args, kwargs)
        members = partition(self.blocks, parameters)
        self._tensors = {parameter.tensor for parameter in parameters.values()}
        owned = Counter(name for own in members.values() for name in own)
        self._frozen = {name: parameter.tensor for name, parameter in parameters.items() if owned[name] != 1}
        for block in self.blocks:
            # Frozen ones too: they may be freed later, and optimisers skip a parameter without a gradient.
            tensors = [parameter.tensor for parameter in members[block.name].values()]
            if block.optimizer is not None and tensors:
                optimizer = block.optimizer(tensors)
                if not isinstance(optimizer, torch.optim.Optimizer):
                    raise TypeError(
                        f"block {block.name!r}: expected optimizer to make a torch optimiser of tensors, got "
                        f"{type(optimizer).__name__}; pass optimizer=lambda tensors: torch.optim.Adam(tensors, lr=0.01), say"
                    )
                self.optimizers[block.name] = optimizer
        self._restore()
        self._members = members  # last: after an error, the next step starts again

    def _take_gradient_steps(self, block: Block, loss: Any, args: tuple, kwargs: dict[str, Any]) -> float:
        """Take gradient steps, and return the loss before the first."""
        optimizer = self.optimizers[block.name]
        is_bound = isinstance(loss, ELBO)
        loss_and_grads = loss.loss_and_grads if is_bound else loss

        def closure() -> float:
            optimizer.zero_grad()
            with self._checked():
                value = loss_and_grads(self.model, self.guide, *args, **kwargs)
            number = torch_item(value)
            check_bound(number)
            if isinstance(value, Tensor) and value.requires_grad:
                value.backward()
            return number

        with without_gradients(self._tensors - _tensors_of(optimizer)):
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
    def _checked(self) -> Iterator[None]:
        """Run a bound; raise if it uses parameters that the first step did not."""
        with EvaluateBound(), poutine.trace(param_only=True) as capture:
            try:
                yield
            except NotImplementedError as error:
                if "reparameterized" in str(error):
                    error.add_note("Pass loss=Trace_ELBO() or TraceEnum_ELBO(), which take guides with discrete sites.")
                raise
        used = {name: unconstrained(site) for name, site in capture.trace.nodes.items()}
        self.parameters |= used
        if self._tensors and (new := [name for name, tensor in used.items() if tensor not in self._tensors]):
            raise RuntimeError(
                f"expected the parameters of the first step, got new tensors for {new}: after loading Pyro's param store or "
                "adding parameters, make a new BlockCoordinateVI"
            )


def _tensors_of(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    return {tensor for group in optimizer.param_groups for tensor in group["params"]}
