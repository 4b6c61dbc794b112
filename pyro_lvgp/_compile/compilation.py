"""Recorded graphs compiled by torch, and compared with their operations run one by one."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

Compiled = Callable[..., Sequence[Tensor | None]]


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
    """The graph, compiled for tensors of these shapes; or the graph itself, with a warning, if the compiler errs.

    :param graph: of tensor operations, as :func:`~pyro_lvgp._compile.recording.record_pure` returns it.
    :param tensors: arguments, at which results are compared.
    :param backend: of ``torch.compile``.
    :param options: of the backend.  Those of ``"inductor"`` have defaults: the draws of torch's own generators rather than
        the compiler's, which are float32; and on the CPU a wrapper in C++ around its kernels.  ``{"triton.cudagraphs": True}``
        launches all kernels of a GPU at once, as a CUDA graph, which operations that wait for the GPU break.
    :param compare: whether compiled results differ from the graph's only by rounding is looked at; not for graphs that draw.
    :param guarded: whether ``torch.compile`` looks at shapes and strides at each call, and compiles anew for other ones; False
        takes the time of that away, of contiguous tensors that are alike at all calls.

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
        if guarded or backend != "inductor":
            compiled = torch.compile(graph, fullgraph=True, dynamic=False, backend=backend, options=options or None)
        else:
            for node in graph.graph.find_nodes(op="placeholder"):
                node.meta.clear()  # of the recording, which are not the compiler's own
            compiled = torch._inductor.compile(graph, list(tensors), options=options)
        if options.get("triton.cudagraphs"):
            compiled = _keeping_results(compiled)
            for _ in range(2):  # to warm up, and to capture; later runs replay
                compiled(*tensors)
        found = compiled(*tensors)
    if not compare or _are_close(found, graph(*tensors)):
        return compiled
    warnings.warn(
        f"the compiler {backend!r} errs: the same operations have other results when compiled. They are run one by one "
        "instead, still without Python and Pyro around them",
        stacklevel=3,
    )
    return graph


def _keeping_results(compiled: Compiled) -> Compiled:
    """With copies of the results, which the next replay of a CUDA graph would write over."""
    return lambda *tensors: [None if result is None else result.clone() for result in compiled(*tensors)]


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    """Without what torch says about its own parts: what it deprecates, and which operations its C++ wrapper hands on; and
    without its advice to multiply in TensorFloat32, whose ten bits leave few covariance matrices positive definite.
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


def _are_close(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Whether results are the same but for rounding, which terms of the size of the largest leave behind."""
    pairs = [
        (one, other)
        for one, other in zip(found, expected, strict=True)
        if one is not None and other is not None and other.numel() and other.is_floating_point()
    ]
    largest = max((float(other.abs().max()) for _, other in pairs), default=0.0)
    return all(
        torch.allclose(one, other, rtol=0.0, atol=eps**0.25 * float(other.abs().max()) + eps**0.75 * largest, equal_nan=True)
        for one, other in pairs
        for eps in [torch.finfo(other.dtype).eps]
    )
