"""Any of the bounds, with its gradients, compiled into one graph."""

import itertools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
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
from torch.utils._pytree import tree_flatten, tree_unflatten

from pyro_lvgp._compile.compilation import Compiled, compile_graph
from pyro_lvgp._compile.recording import Recording, record
from pyro_lvgp._utils.seeding import seeded
from pyro_lvgp.infer._parameters import unconstrained
from pyro_lvgp.infer.elbo.base import DifferentiableELBO


class CompiledELBO(ELBO):
    """A bound whose loss and gradients are one graph, compiled by ``torch.compile``: the arithmetic without Python and Pyro.

    The first step runs as always.  The second is recorded through model, guide, handlers and backward pass down to the tensor
    operations, which are compiled; that takes from seconds to minutes, the longer the more operations there are.  From then
    on a step runs the graph only, which has fixed what does not come by parameters and tensor arguments, as that of Pyro's
    ``JitTrace_ELBO`` has: the structure, settings of modules, tensors that you put in place of others.  Arguments of other
    shapes, and other numbers or strings, get graphs of their own.

    Where the graph relies on values, it checks (see ``assume``): a step whose values are others, such as one whose kernel
    matrix needs more jitter, runs as if not compiled, with a warning the first time.  The tenth such step is recorded in
    place of the first, the hundredth after that again, and so on: a graph of a mini-batch with gaps serves those without, but
    not the other way round.  Random numbers are
    those of a step not compiled, unless some depend on parameters (a Gamma's, say).  If none do, the first results of a graph
    are compared with those of its operations run one by one; should they differ by more than rounding, which compilers have
    caused, the operations are run from then on, with a warning.

    :param bound: :class:`MeanFieldELBO`, :class:`ImportanceWeightedELBO`, :class:`StructuredELBO`, or Pyro's ``Trace_ELBO`` or
        ``TraceMeanField_ELBO``.
    :param backend: of ``torch.compile``.
    :param options: of the backend, beside those of :func:`~pyro_lvgp._compile.compilation.compile_graph`.
    :raises TypeError: for other bounds, subclasses of Pyro's too; at a step, for arguments that cannot be hashed, such as
        NumPy arrays.
    :raises ValueError: at the second step, if what model or guide do depends on the values of tensors.

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

    def __init__(self, bound: ELBO, *, backend: str = "inductor", options: Mapping[str, Any] | None = None):
        # Subclasses of Pyro's are other bounds: what they make of the terms of Trace_ELBO is not recorded.
        if not isinstance(bound, DifferentiableELBO) and type(bound) not in (Trace_ELBO, TraceMeanField_ELBO):
            raise TypeError(
                "expected MeanFieldELBO, ImportanceWeightedELBO, StructuredELBO, Trace_ELBO or TraceMeanField_ELBO, got "
                f"{type(bound).__name__}; do not compile it"
            )
        super().__init__(num_particles=bound.num_particles, max_plate_nesting=bound.max_plate_nesting)
        self.bound: Any = bound
        self.backend, self.options = backend, dict(options or {})
        self._steps: dict[Hashable, _Step] = {}

    def loss(self, model: Any, guide: Any, *args, **kwargs) -> float:
        """Minus an estimate of the bound, without gradients; not compiled."""
        return self.bound.loss(model, guide, *args, **kwargs)

    def differentiable_loss(self, model: Any, guide: Any, *args, **kwargs) -> Tensor:
        """Minus an estimate of the bound, to differentiate; not compiled."""
        return self.bound.differentiable_loss(model, guide, *args, **kwargs)

    def loss_and_grads(self, model: Any, guide: Any, *args, **kwargs) -> float:
        """Minus an estimate of the bound; its gradients are added to the parameters'."""
        leaves, structure = tree_flatten((args, kwargs))
        signature = (model, guide, str(structure), *map(_described, leaves))
        step = self._steps.get(signature)
        if step is None or step.is_outdated():
            with poutine.trace(param_only=True) as capture:
                value = self.bound.loss_and_grads(model, guide, *args, **kwargs)
            self._steps[signature] = _Step(capture.trace)
            return value
        named = step.current_params()
        params = list(dict.fromkeys(named.values()))  # one may have two names
        tensors = [*params, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        trained = tuple(param.requires_grad for param in params)

        def compile_this() -> None:
            # Aliases: a tensor that is two arguments, or that model or guide hold too, need not be one at other steps.
            aliases = [leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            inputs = [*params, *(alias for alias in aliases if isinstance(alias, Tensor))]
            args, kwargs = tree_unflatten(aliases, structure)
            recording = record(lambda: self._loss_and_gradients(model, guide, args, kwargs, params), inputs)
            step.compiled[trained] = recording.draws, self._compile(recording, tensors)

        if trained not in step.compiled:
            compile_this()
        loss, *gradients, holds = step.run(trained, tensors)
        if not holds:
            step.num_broken += 1
            if step.num_broken < step.patience:
                warnings.warn(
                    "a condition that held when the bound was compiled does not hold at this step (a Cholesky factorisation "
                    "needs more jitter, or entries are missing that were not): such steps run as if not compiled",
                    stacklevel=2,
                )
                return self.bound.loss_and_grads(model, guide, *args, **kwargs)
            step.num_broken, step.patience = 0, 10 * step.patience
            compile_this()
            loss, *gradients, _ = step.run(trained, tensors)
        step.report_params(named)
        for param, gradient in zip(itertools.compress(params, trained), gradients, strict=True):
            if gradient is not None:
                param.grad = gradient if param.grad is None else param.grad + gradient
        value = torch_item(loss)
        warn_if_nan(value, "loss")
        return value

    def _get_trace(self, model: Any, guide: Any, args: tuple, kwargs: dict) -> tuple[Trace, Trace]:
        return self.bound._get_trace(model, guide, args, kwargs)

    def _compile(self, recording: Recording, tensors: Sequence[Tensor]) -> Compiled:
        with seeded(0):
            draws = recording.draws()
            options: dict[str, Any] = {"backend": self.backend, "options": self.options, "compare": not recording.is_random}
            return compile_graph(recording.graph, [*tensors, *draws], **options)

    def _loss_and_gradients(
        self, model: Any, guide: Any, args: tuple, kwargs: dict[str, Any], params: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            if isinstance(self.bound, Trace_ELBO):
                # Pyro's own take numbers out of tensors on the way from these terms to differentiable_loss.
                traces = self.bound._get_traces(model, guide, args, kwargs)
                terms = [self.bound._differentiable_loss_particle(*pair) for pair in traces]
                loss, surrogate = (sum(term) / self.bound.num_particles for term in zip(*terms, strict=True))
            else:
                loss = surrogate = self.bound.differentiable_loss(model, guide, *args, **kwargs)
            trained = [param for param in params if param.requires_grad]
            gradients = torch.autograd.grad(surrogate, trained, allow_unused=True) if trained else ()
        return loss.detach(), *gradients


class _Step:
    """The parameters that a step used, in which order, and its graphs, two for each set of parameters that are trained.

    :param capture: trace of the parameters of a step.
    """

    def __init__(self, capture: Trace):
        self._params = {name: unconstrained(site) for name, site in capture.nodes.items() if site["type"] == "param"}
        self._in_store = self._params.keys() & pyro.get_param_store().keys()
        self.compiled: dict[tuple[bool, ...], tuple[Callable[[], tuple], Compiled]] = {}
        self.num_broken, self.patience = 0, 10

    @torch.no_grad()
    def run(self, trained: tuple[bool, ...], tensors: Sequence[Tensor]) -> Sequence[Any]:
        """What the graph returns, at new draws."""
        draws, compiled = self.compiled[trained]
        return compiled(*tensors, *draws())

    def is_outdated(self) -> bool:
        """Whether parameters have gone from Pyro's store."""
        return not self._in_store <= pyro.get_param_store().keys()

    def current_params(self) -> dict[str, Tensor]:
        """The unconstrained tensors, which others may have taken the place of in Pyro's store."""
        stored = dict(pyro.get_param_store().named_parameters())
        return {name: stored[name] if name in self._in_store else param for name, param in self._params.items()}

    def report_params(self, params: Mapping[str, Tensor]) -> None:
        """Tell whoever traces this step, such as ``SVI``, which parameters it used."""
        for name, param in params.items():
            _param(_Unconstrained(param), name=name)


class _Unconstrained(NamedTuple):
    """What Pyro looks for in the value of a parameter, without the cost of its constraint."""

    tensor: Tensor

    def unconstrained(self) -> Tensor:
        return self.tensor


@effectful(type="param")
def _param(value: _Unconstrained) -> _Unconstrained:
    """A parameter site."""
    return value


def _described(leaf: Any) -> Hashable:
    """What a graph is made for: everything but the values of tensors."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    if not isinstance(leaf, Hashable):
        raise TypeError(
            f"expected tensors, numbers or strings as arguments, got {type(leaf).__name__}; use torch.as_tensor(...)"
        )
    return type(leaf), leaf
