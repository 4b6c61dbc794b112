"""Compilation of recorded graphs by ``torch.compile`` or TorchScript, with a check of the results against eager execution."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pyro_lvgp._compile.simplification import simplified

__all__ = ["Compiled", "compile_graph"]

Compiled = Callable[..., Sequence[Tensor | None]]

_LOG = logging.getLogger("pyro_lvgp")


@torch.no_grad()
def compile_graph(
    graph: GraphModule,
    tensors: Sequence[Tensor],
    *,
    backend: str = "inductor",
    options: Mapping[str, Any] | None = None,
    compare: bool = True,
    guarded: bool = True,
) -> Compiled:
    """Compile a graph for tensors of given shapes; return the graph itself, with a warning, if compiled results are wrong.

    :param graph: tensor operations, recorded by :func:`~pyro_lvgp._compile.recording.record_pure`.
    :param tensors: arguments for which the results are compared.
    :param backend: backend of ``torch.compile``, or ``"torchscript"``, whose interpreter runs the operations of the
        graph, :func:`~pyro_lvgp._compile.simplification.simplified`, one by one without Python, with the same results to the
        last bit on a CPU, after less than a second; from Python if TorchScript cannot trace all of them.  ``"eager"`` returns
        the graph itself.
    :param options: options of a backend of ``torch.compile``.  The defaults for ``"inductor"`` are the random numbers of
        torch's own generators, since the compiler's are float32, and on the CPU a C++ wrapper around the kernels.
        ``{"triton.cudagraphs": True}`` launches all kernels of a GPU at once, as a CUDA graph, which does not allow operations
        that wait for the GPU.
    :param compare: compare compiled with eager results; not for graphs that draw random numbers.
    :param guarded: check shapes and strides at each call, and compile again if they change; False saves the time of the
        check, for contiguous tensors of equal shapes at all calls.

    >>> from pyro_lvgp._compile.recording import record_pure
    >>> x = torch.ones(2)
    >>> compile_graph(record_pure(lambda x: (x.exp(),), [x]), [x], backend="eager")(x)
    (tensor([2.7183, 2.7183]),)
    """
    options = dict(options or {})
    if backend == "inductor":
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        options = {"fallback_random": True, "cpp_wrapper": on_cpu, **options}
    with _quiet_compiler():
        if backend == "torchscript":
            compiled = _script(simplified(graph), tensors)
        elif backend == "eager":
            return graph
        elif guarded or backend != "inductor":
            compiled = torch.compile(graph, fullgraph=True, dynamic=False, backend=backend, options=options or None)
        else:
            for node in graph.graph.find_nodes(op="placeholder"):
                node.meta.clear()  # the compiler does not accept the metadata of the recording
            compiled = torch._inductor.compile(graph, list(tensors), options=options)
        if options.get("triton.cudagraphs"):
            compiled = _copy_results(compiled)
            for _ in range(2):  # warm-up and capture; later runs replay
                compiled(*tensors)
        results = compiled(*tensors)
    if not compare or _are_close(results, graph(*tensors)):
        return compiled
    warnings.warn(
        f"results compiled by backend {backend!r} differ from eager results by more than rounding; the recorded graph is run "
        "eagerly instead",
        stacklevel=3,
    )
    return graph


def _script(graph: GraphModule, tensors: Sequence[Tensor]) -> Compiled:
    """Convert a graph to TorchScript; its operations are those of the graph, since the interpreter fuses none on a CPU.

    A graph with an operation that TorchScript cannot trace, such as gradients of convolutions, is returned as it is.
    """
    (results,) = graph.graph.output_node().args
    assert isinstance(results, list | tuple)
    positions = [i for i, result in enumerate(results) if result is not None]

    class Present(torch.nn.Module):
        """The graph without results that are None, which TorchScript does not accept."""

        def __init__(self) -> None:
            super().__init__()
            self.graph = graph

        def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            found = self.graph(*tensors)
            return tuple(found[i] for i in positions)

    # Views, since a tensor that is passed twice would be one input.
    views = tuple(tensor.view_as(tensor) for tensor in tensors)
    try:
        scripted: Any = torch.jit.trace(Present(), views, check_trace=False)
    except RuntimeError as error:
        if "unsupported argument type in the JIT tracer" not in str(error):
            raise
        _LOG.info("TorchScript cannot trace all operations of a step; the recorded operations are run from Python instead")
        return graph

    def run(*tensors: Tensor) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * len(results)
        for i, result in zip(positions, scripted(*tensors), strict=True):
            found[i] = result
        return found

    return run


def _copy_results(compiled: Compiled) -> Compiled:
    """Copy the results of a CUDA graph, which the next replay overwrites."""
    return lambda *tensors: [None if result is None else result.clone() for result in compiled(*tensors)]


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """Suppress warnings of torch about its own code, and its advice to use TensorFloat32, which is too imprecise for the
    Cholesky factorization of covariance matrices.
    """
    log = logging.getLogger("torch._inductor.ir")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", "TensorFloat32", UserWarning)
            yield
    finally:
        log.setLevel(level)


def _are_close(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Whether results are equal up to rounding, relative to their own size and to the largest of all results."""
    pairs = [
        (result, reference)
        for result, reference in zip(actual, expected, strict=True)
        if result is not None and reference is not None and reference.numel() and reference.is_floating_point()
    ]
    largest = max((float(reference.abs().max()) for _, reference in pairs), default=0.0)
    return all(
        torch.allclose(
            result,
            reference,
            rtol=0.0,
            atol=eps**0.25 * float(reference.abs().max()) + eps**0.75 * largest,
            equal_nan=True,
        )
        for result, reference in pairs
        for eps in [torch.finfo(reference.dtype).eps]
    )
