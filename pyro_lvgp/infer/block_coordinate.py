"""Block coordinate ascent variational inference."""

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

from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp._utils.validation import check_bound
from pyro_lvgp.infer._optimizer_state import check_optimizer_state
from pyro_lvgp.infer._parameters import Parameter, find_parameters, unconstrained, without_gradients
from pyro_lvgp.infer.block import Block, Loss, partition
from pyro_lvgp.infer.elbo._limits import BoundLimit, needs_check
from pyro_lvgp.infer.elbo.handlers import EvaluateBound

__all__ = ["BlockCoordinateVI"]


class BlockCoordinateVI:
    """Block coordinate ascent on a bound, with gradient steps or closed forms for each block.

    Use it in place of Pyro's ``SVI``, with any model, guide and ELBO.  A sweep visits the blocks in order.  A block that is
    updated by gradient has its own optimiser, and no other parameter requires gradients during its steps.

    The first step runs guide and model once to find their parameters.  Each parameter that requires gradients must be in
    exactly one block.  ``requires_grad_(False)`` freezes a parameter, before the first step or later, and a block whose
    parameters are all frozen is skipped.  A parameter that model and guide share has its name in the model.

    ``parameters`` has the unconstrained tensors used so far, by their names in Pyro's param store, and ``optimizers`` the
    torch optimisers of the blocks, by the block's name.

    :param model: a Pyro model.
    :param guide: a Pyro guide.
    :param blocks: the blocks, in the order of a sweep.
    :param loss: the bound to maximise, ``TraceMeanField_ELBO()`` by default, which takes no discrete sites of a guide; or, as
        for ``SVI``, a function of model, guide and their arguments that returns a differentiable estimate of minus a bound.
    :param check_updates: number of evaluations of the loss before and after each closed form, with the same random numbers.
        One (True) suits an exact loss, which an exact closed form never raises.  For a loss estimated by draws use more: its
        mean must not rise by more than four standard errors.
    :raises ValueError: if there are no blocks or two of one name; at the first step, if parameters are in no block or in
        several, or a block matches no parameter.
    :raises TypeError: if ``blocks`` has an item that is no ``Block``, or ``loss`` is a class; at the first step, if
        ``optimizer`` of a block returns no torch optimiser.

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

    @checks_types
    def __init__(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        blocks: Sequence[Block],
        *,
        loss: Loss | None = None,
        check_updates: bool | int = False,
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
        self._loaded_states: Mapping[str, Any] = {}  # for optimisers that are made at the first step
        self._num_sweeps, self._limit = 0, BoundLimit()

    @pyro_lock
    def step(self, *args, **kwargs) -> float:
        """Sweep through the blocks once.

        :param args: arguments of model and guide.
        :returns: minus an estimate of the bound, as ``SVI.step``: the loss before the first gradient step of the sweep.  If no
            block takes gradient steps on the bound of the inference, the bound is evaluated before the sweep.
        :raises ValueError: if an update returns other names or shapes than those of its parameters, or values outside their
            constraints, or if a bound is NaN or infinite (before a gradient step changes parameters).
        :raises TypeError: if an update returns no tensors by name.
        :raises RuntimeError: if ``check_updates`` is set and an update raises the loss, or if since the first step parameters
            were added or replaced, or parameters in no block were unfrozen.
        """
        if not self._members:
            self._start(args, kwargs)
        if unfrozen := [name for name, tensor in self._frozen.items() if tensor.requires_grad]:
            raise RuntimeError(
                f"expected {unfrozen} to stay frozen, as at the first step, since they are not in exactly one block; make a "
                "new BlockCoordinateVI in which they are"
            )
        trained = {name for name, own in self.optimizers.items() if any(tensor.requires_grad for tensor in _tensors_of(own))}
        is_evaluated = any(block.name in trained and block.loss is None for block in self.blocks)
        losses = [] if is_evaluated else [self.evaluate_loss(*args, **kwargs)]
        for block in self.blocks:
            if block.update is not None:
                self._update_in_closed_form(block, args, kwargs)
            elif block.name in trained:
                value = self._take_gradient_steps(block, block.loss or self.loss, args, kwargs)
                losses += [value] if block.loss is None else []
        self._num_sweeps += 1
        return losses[0]

    @pyro_lock
    def evaluate_loss(self, *args, **kwargs) -> float:
        """Compute minus an estimate of the bound, without gradients.

        :param args: arguments of model and guide.
        """
        with torch.no_grad(), self._checked():
            is_bound = isinstance(self.loss, ELBO)
            loss = self.loss.loss if is_bound else self.loss
            return torch_item(loss(self.model, self.guide, *args, **kwargs))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the optimisers' states, and the number of sweeps; parameters are not included."""
        states = {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}
        return {"num_sweeps": self._num_sweeps, "optimizers": deepcopy({**self._loaded_states, **states})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; optimisers that do not exist before the first step take their states then.

        :param state: returned by :meth:`state_dict`.
        :raises ValueError: for states of other blocks.
        """
        known = {block.name for block in self.blocks if block.optimizer is not None}
        if not state["optimizers"].keys() <= known:
            raise ValueError(f"expected states of the blocks {sorted(known)}, got those of {sorted(state['optimizers'])}")
        # A copy, because optimisers change the tensors of their states.
        self._num_sweeps, self._loaded_states = state["num_sweeps"], deepcopy(state["optimizers"])
        self._restore_optimizers()

    def _restore_optimizers(self) -> None:
        for name, optimizer in self.optimizers.items():
            if name in self._loaded_states:
                params = [param for group in optimizer.param_groups for param in group["params"]]
                for index, own in self._loaded_states[name]["state"].items():
                    check_optimizer_state(own, params[index], f"block {name}")
                optimizer.load_state_dict(self._loaded_states[name])

    def _start(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Find the parameters of model and guide, assign them to blocks, and make the optimisers."""
        parameters = find_parameters(self.model, self.guide, args, kwargs)
        members = partition(self.blocks, parameters)
        self._tensors = {parameter.tensor for parameter in parameters.values()}
        owned = Counter(name for own in members.values() for name in own)
        self._frozen = {name: parameter.tensor for name, parameter in parameters.items() if owned[name] != 1}
        for block in self.blocks:
            # Frozen parameters are included, because they may be unfrozen; optimisers skip parameters without a gradient.
            tensors = [parameter.tensor for parameter in members[block.name].values()]
            if block.optimizer is not None and tensors:
                optimizer = block.optimizer(tensors)
                if not isinstance(optimizer, torch.optim.Optimizer):
                    raise TypeError(
                        f"block {block.name!r}: expected optimizer to make a torch optimiser of tensors, got "
                        f"{type(optimizer).__name__}; pass optimizer=lambda tensors: torch.optim.Adam(tensors, lr=0.01)"
                    )
                self.optimizers[block.name] = optimizer
        self._restore_optimizers()
        self._members = members  # last, so that the next step starts again after an error

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
            if needs_check(loss, self.model):
                self._limit.check(number, self.model, self.guide, args, kwargs)
            if isinstance(value, Tensor) and value.requires_grad:
                value.backward()
            return number

        with without_gradients(self._tensors - _tensors_of(optimizer)):
            try:
                losses = [optimizer.step(closure) for _ in range(block.num_steps)]
            finally:
                optimizer.zero_grad()
        return losses[0]

    def _update_in_closed_form(self, block: Block, args: tuple, kwargs: dict[str, Any]) -> None:
        """Update a block in closed form, with damping."""
        assert block.update is not None
        members = self._members[block.name]
        trained = {name for name, parameter in members.items() if parameter.tensor.requires_grad}
        if not trained:
            return
        before = self._comparable_losses(args, kwargs)
        rho = block.damping_after(self._num_sweeps)
        with torch.no_grad():
            values = block.update(*args, **kwargs)
            if not isinstance(values, Mapping) or not all(isinstance(value, Tensor) for value in values.values()):
                raise TypeError(f"block {block.name!r}: expected update to return tensors by name, got {values!r}")
            if not trained <= values.keys() <= members.keys():
                raise ValueError(
                    f"block {block.name!r}: expected update to return values of {sorted(members)}, got {sorted(values)}"
                )
            # Compute all before writing any, because the values may be the parameters themselves.
            new = {name: members[name].towards(values[name], rho, name) for name in trained}
            for name, value in new.items():
                members[name].tensor.copy_(value)
        if self.check_updates:
            rise = self._comparable_losses(args, kwargs) - before
            error = rise.std() / self.check_updates**0.5 if self.check_updates > 1 else 0.0
            eps = max(torch.finfo(parameter.tensor.dtype).eps for parameter in members.values())
            if not rise.mean() <= 4.0 * error + eps ** (2 / 3) * (1.0 + before.mean().abs()):
                raise RuntimeError(
                    f"the update of block {block.name!r} raised the loss from {before.mean()} to {(before + rise).mean()}: it "
                    "is not the closed form, or the loss is an estimate; use a loss without noise, or check_updates=100"
                )

    def _comparable_losses(self, args: tuple, kwargs: dict[str, Any]) -> Float[Tensor, " checks"]:
        """Evaluate the loss ``check_updates`` times, with the same random numbers at every call."""

        def loss(seed: int) -> float:
            with seeded(seed):
                return self.evaluate_loss(*args, **kwargs)

        return torch.tensor([loss(seed) for seed in range(self.check_updates)], dtype=torch.float64)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Context for a bound, which raises if the bound uses parameters that the first step did not use."""
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
