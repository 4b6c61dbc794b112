"""Recording of a bound and its gradients as one graph, which is compiled or run without Python."""

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.util import torch_item
from pyro.poutine import Trace
from pyro.poutine.runtime import effectful
from pyro.util import warn_if_nan
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pyro_lvgp._compile.compilation import Compiled, compile_graph
from pyro_lvgp._compile.recording import CountOperations, record
from pyro_lvgp._utils.argument_types import checks_types
from pyro_lvgp._utils.control_flow import record_conditions
from pyro_lvgp._utils.pyro_lock import pyro_lock
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.infer._parameters import unconstrained
from pyro_lvgp.infer.elbo._limits import BoundLimit
from pyro_lvgp.infer.elbo.base import DifferentiableELBO

__all__ = ["CompiledELBO"]


class CompiledELBO(ELBO):
    """Bound whose loss and gradients are one graph, compiled by ``torch.compile`` or run by the interpreter of TorchScript.

    Such steps spend no time in Python and Pyro.

    The first step runs eagerly.  The second step is recorded through model, guide, handlers and backward pass as a graph of
    tensor operations, which takes a second or two, and compiled, which takes seconds to minutes, and grows with the number of
    operations.  Later steps run the graph.  Under ``backend="torchscript"`` it is not compiled: its operations run one by one
    without Python.  On a CPU their results are those of eager steps to the last bit, but for rounding where entries are
    missing.

    As in Pyro's ``JitTrace_ELBO``, everything but parameters and tensor arguments is constant in a graph: the structure,
    settings of modules, and attributes that are tensors.  Arguments of other shapes, and other numbers or strings, have graphs
    of their own.

    A graph checks the conditions on values under which it was recorded.  A step that violates a condition, such as one whose
    kernel matrix needs more jitter, runs eagerly, with a warning if the graph was compiled.  The tenth such step is recorded
    again and replaces the graph, then the hundredth, and so on: a graph recorded for a mini-batch with missing entries is
    valid for complete mini-batches, but not vice versa.

    Random numbers are those of an eager step, unless a draw depends on parameters (such as that of a Gamma).  Without such
    draws, the first results of a graph are compared with those of eager execution.  If the results differ by more than
    rounding, the recorded graph is run eagerly, with a warning.

    :param bound: :class:`MeanFieldELBO`, :class:`ImportanceWeightedELBO`, :class:`StructuredELBO`, or Pyro's ``Trace_ELBO`` or
        ``TraceMeanField_ELBO``.
    :param backend: backend of ``torch.compile``, or ``"torchscript"``.
    :param max_operations: largest number of tensor operations of a step that is recorded, since the time to record grows with
        it; larger steps run eagerly.  None sets no limit.
    :param options: options of the backend.  For ``"inductor"`` the defaults are torch's own random numbers
        (``fallback_random``) and, on the CPU, a C++ wrapper around the kernels (``cpp_wrapper``).
    :raises TypeError: for other bounds, including subclasses of Pyro's; at a step, for arguments that cannot be hashed, such
        as NumPy arrays.
    :raises ValueError: at the second step, if operations of model or guide depend on the values of tensors.

    >>> from pyro.infer import SVI
    >>> from pyro_lvgp.guides import MeanFieldGuide
    >>> from pyro_lvgp.infer import JointOptim, MeanFieldELBO
    >>> from pyro_lvgp.models import BayesianGPLVM
    >>> Y = torch.randn(20, 3)
    >>> model = BayesianGPLVM(20, 3, latent_dim=2, num_inducing=5)
    >>> bound = CompiledELBO(MeanFieldELBO(), backend="eager")  # a graph, but not compiled
    >>> svi = SVI(model, MeanFieldGuide(model), JointOptim(torch.optim.Adam, {"lr": 0.01}), bound)
    >>> losses = [svi.step(Y) for _ in range(3)]
    """

    @checks_types
    def __init__(
        self,
        bound: ELBO,
        *,
        backend: str = "inductor",
        max_operations: int | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        # Subclasses of Pyro's bounds may combine the terms of Trace_ELBO differently, which would not be recorded.
        if not isinstance(bound, DifferentiableELBO) and type(bound) not in (Trace_ELBO, TraceMeanField_ELBO):
            raise TypeError(
                "expected MeanFieldELBO, ImportanceWeightedELBO, StructuredELBO, Trace_ELBO or TraceMeanField_ELBO, got "
                f"{type(bound).__name__}; do not compile it"
            )
        super().__init__(num_particles=bound.num_particles, max_plate_nesting=bound.max_plate_nesting)
        self.bound: Any = bound
        self.backend, self.max_operations, self.options = backend, max_operations, dict(options or {})
        self._steps: dict[Hashable, _Step] = {}
        self._limit = BoundLimit()

    @pyro_lock
    def loss(self, model: Any, guide: Any, *args, **kwargs) -> float:
        """Compute minus an estimate of the bound, without gradients and without compilation."""
        return self.bound.loss(model, guide, *args, **kwargs)

    def differentiable_loss(self, model: Any, guide: Any, *args, **kwargs) -> Tensor:
        """Compute minus an estimate of the bound, to differentiate, without compilation."""
        return self.bound.differentiable_loss(model, guide, *args, **kwargs)

    @pyro_lock
    def loss_and_grads(self, model: Any, guide: Any, *args, **kwargs) -> float:
        """Compute minus an estimate of the bound, and add its gradients to those of the parameters."""
        value = self._loss_and_grads(model, guide, args, kwargs)
        if not isinstance(self.bound, DifferentiableELBO) or self.bound.is_bound:
            self._limit.check(value, model, guide, args, kwargs)
        return value

    def _loss_and_grads(self, model: Any, guide: Any, args: tuple, kwargs: dict) -> float:
        leaves, structure = tree_flatten((args, kwargs))
        signature = (model, guide, str(structure), *map(_signature, leaves))
        step = self._steps.get(signature)
        if step is None or step.is_outdated():
            is_compiled = self.backend != "torchscript"
            # By the operations that are to be recorded, so that a fit goes on from a checkpoint with the same results.
            as_recorded = nullcontext() if is_compiled else record_conditions(bool)
            with poutine.trace(param_only=True) as capture, CountOperations() as operations, as_recorded:
                value = self.bound.loss_and_grads(model, guide, *args, **kwargs)
            # A compilation is worth a warning where it is of no use; a recording takes little time.
            self._steps[signature] = _Step(capture.trace, operations.total, warns=is_compiled)
            return value
        if self.max_operations is not None and step.num_operations > self.max_operations:
            return self.bound.loss_and_grads(model, guide, *args, **kwargs)
        named = step.current_params()
        params = list(dict.fromkeys(named.values()))  # one parameter may have two names
        results = step.run(params, _tensors(leaves), partial(self._compile, model, guide, params, leaves, structure))
        if results is None:
            return self.bound.loss_and_grads(model, guide, *args, **kwargs)
        loss, *gradients = results
        step.report_params(named)
        for param, gradient in zip((param for param in params if param.requires_grad), gradients, strict=True):
            if gradient is not None:
                param.grad = gradient if param.grad is None else param.grad + gradient
        value = torch_item(loss)
        warn_if_nan(value, "loss")
        return value

    def _get_trace(self, model: Any, guide: Any, args: tuple, kwargs: dict) -> tuple[Trace, Trace]:
        return self.bound._get_trace(model, guide, args, kwargs)

    def _compile(
        self, model: Any, guide: Any, params: Sequence[Tensor], leaves: Sequence[Any], structure: TreeSpec
    ) -> "_CompiledStep":
        """Record loss and gradients as a graph of parameters and tensor arguments, and compile the graph."""
        # Views, because a tensor that is passed twice, or that is an attribute of the model too, may differ at other steps.
        views = [leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(views, structure)
        loss_and_gradients = partial(self._loss_and_gradients, model, guide, args, kwargs, params)
        recording = record(loss_and_gradients, [*params, *_tensors(views)])
        with seeded(0):
            random_inputs = recording.random_inputs()
            tensors = [*params, *_tensors(leaves), *random_inputs]
            options: dict[str, Any] = {"backend": self.backend, "options": self.options}
            compiled = compile_graph(recording.graph, tensors, compare=not recording.is_random, **options)
        return _CompiledStep(recording.random_inputs, compiled)

    def _loss_and_gradients(
        self, model: Any, guide: Any, args: tuple, kwargs: dict[str, Any], params: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            if isinstance(self.bound, Trace_ELBO):
                # Pyro's differentiable_loss converts these terms to Python numbers.
                traces = self.bound._get_traces(model, guide, args, kwargs)
                terms = [self.bound._differentiable_loss_particle(*pair) for pair in traces]
                loss, surrogate = (sum(term) / self.bound.num_particles for term in zip(*terms, strict=True))
            else:
                loss = surrogate = self.bound.differentiable_loss(model, guide, *args, **kwargs)
            trained = [param for param in params if param.requires_grad]
            gradients = torch.autograd.grad(surrogate, trained, allow_unused=True) if trained else ()
        return loss.detach(), *gradients


class _CompiledStep(NamedTuple):
    """A compiled graph of loss and gradients, and the graph that draws its random inputs."""

    random_inputs: Callable[[], Sequence[Tensor]]
    graph: Compiled


class _Step:
    """Parameters of a step, and a compiled graph for each set of parameters that are trained.

    :param capture: trace of the parameters of a step.
    :param num_operations: number of tensor operations of a step.
    :param warns: warn where a condition of a graph does not hold.
    """

    def __init__(self, capture: Trace, num_operations: int, *, warns: bool):
        self.num_operations, self._warns = num_operations, warns
        self._params = {name: unconstrained(site) for name, site in capture.nodes.items() if site["type"] == "param"}
        self._in_store = self._params.keys() & pyro.get_param_store().keys()
        self._compiled: dict[tuple[bool, ...], _CompiledStep] = {}
        self._num_invalid, self._patience = 0, 10

    def run(
        self, params: Sequence[Tensor], arguments: Sequence[Tensor], compile_step: Callable[[], _CompiledStep]
    ) -> Sequence[Any] | None:
        """Compute loss and gradients at new random inputs; return None if a condition of the graph does not hold.

        After a number of steps whose conditions do not hold, the step is recorded and compiled again.

        :param params: current parameters.
        :param arguments: tensor arguments of the step.
        :param compile_step: records and compiles the step.
        """
        trained = tuple(param.requires_grad for param in params)
        if trained not in self._compiled:
            self._compiled[trained] = compile_step()
        *results, is_valid = self._call(trained, params, arguments)
        if is_valid:
            return results
        self._num_invalid += 1
        if self._num_invalid < self._patience:
            if self._warns:
                warnings.warn(
                    "a condition that held when the bound was compiled does not hold at this step (a Cholesky factorisation "
                    "needs more jitter, or entries are missing that were not): such steps run without compilation",
                    stacklevel=4,
                )
            return None
        self._num_invalid, self._patience = 0, 10 * self._patience
        self._compiled[trained] = compile_step()
        return self._call(trained, params, arguments)[:-1]

    @torch.no_grad()
    def _call(self, trained: tuple[bool, ...], params: Sequence[Tensor], arguments: Sequence[Tensor]) -> Sequence[Any]:
        step = self._compiled[trained]
        return step.graph(*params, *arguments, *step.random_inputs())

    def is_outdated(self) -> bool:
        """Return whether a parameter was deleted from Pyro's store."""
        return not self._in_store <= pyro.get_param_store().keys()

    def current_params(self) -> dict[str, Tensor]:
        """Return the current unconstrained parameters, which may have been replaced in Pyro's store."""
        stored = dict(pyro.get_param_store().named_parameters())
        return {name: stored[name] if name in self._in_store else param for name, param in self._params.items()}

    def report_params(self, params: Mapping[str, Tensor]) -> None:
        """Emit the parameters of this step as sites, for handlers such as the trace of ``SVI``."""
        for name, param in params.items():
            _param(_Unconstrained(param), name=name)


class _Unconstrained(NamedTuple):
    """Value of a parameter site whose unconstrained tensor is known, without the cost of the constraint."""

    tensor: Tensor

    def unconstrained(self) -> Tensor:
        return self.tensor


@effectful(type="param")
def _param(value: _Unconstrained) -> _Unconstrained:
    """Send a message of type "param"."""
    return value


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _signature(leaf: Any) -> Hashable:
    """Return the part of an argument that a graph depends on: for tensors shape, dtype and device, not the values."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    if not isinstance(leaf, Hashable):
        raise TypeError(
            f"expected tensors, numbers or strings as arguments, got {type(leaf).__name__}; use torch.as_tensor(...)"
        )
    return type(leaf), leaf
