"""Graphs of quartz work: record a sequence of calls once, then replay it without Python.

On cuda they are CUDA graphs: quartz streams and memory are CUDA's, so PyTorch's own ``torch.cuda.CUDAGraph`` captures
quartz operators as it captures CUDA operators. On host the operator calls of one thread are recorded, and a replay
makes them again from C++ on the same tensors (docs/graphs.md).
"""

from collections.abc import Callable
from typing import Any

import torch

from torch_quartz import _C
from torch_quartz.device.streams import Stream, native_stream
from torch_quartz.device.streams import stream as use_stream

_ERROR_MODES = ("global", "thread_local", "relaxed")


class _HostGraph:
    """`_C.HostGraph` with the methods of ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool):
        self._graph = _C.HostGraph(keep_graph)
        self.capture_end = self._graph.capture_end
        self.capture_abort = self._graph.capture_abort
        self.instantiate = self._graph.instantiate
        self.replay = self._graph.replay
        self.reset = self._graph.reset
        self.pool = self._graph.pool
        self.debug_dump = self._graph.debug_dump

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        if capture_error_mode not in _ERROR_MODES:
            raise RuntimeError(
                "quartz: Graph.capture_begin: capture_error_mode must be one of "
                f"{', '.join(_ERROR_MODES)}, got {capture_error_mode!r}"
            )
        if pool is not None and not (isinstance(pool, tuple) and len(pool) == 2):
            raise TypeError(
                "quartz: Graph.capture_begin: pool must be a pair of integers as Graph.pool() and "
                f"graph_pool_handle() return it, got {pool!r}"
            )
        self._graph.capture_begin((0, 0) if pool is None else pool, capture_error_mode == "relaxed")

    def enable_debug_mode(self) -> None:
        """Keep nothing more: a recorded call has all that `debug_dump` writes."""


class Graph:
    """A captured sequence of quartz work.

    Parameters
    ----------
    keep_graph : bool
        Keep the graph after capture, so that it can be changed before it is instantiated (cuda), and instantiate it
        with `instantiate` or the first `replay` instead of at the end of the capture.

    Examples
    --------
    >>> x = torch.ones(4, device="quartz")
    >>> g = torch.quartz.Graph()
    >>> with torch.quartz.graph(g):
    ...     y = x * 2
    >>> x.fill_(3)
    tensor([3., 3., 3., 3.], device='quartz:0')
    >>> g.replay()
    >>> y
    tensor([6., 6., 6., 6.], device='quartz:0')
    """

    def __init__(self, keep_graph: bool = False):
        self._native = torch.cuda.CUDAGraph(keep_graph) if _C.substrate() == "cuda" else _HostGraph(keep_graph)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Start recording the current stream, which must not be the default one.

        Parameters
        ----------
        pool : tuple or None
            Memory pool to take memory from, as `pool` or `graph_pool_handle` return it. On host graphs give the memory
            of intermediate results back in each replay, with any pool.
        capture_error_mode : str
            ``"global"``, ``"thread_local"`` or ``"relaxed"``: whose unsafe calls end the capture. On host a capture
            sees its own thread alone; ``"relaxed"`` lets that wait for events.

        Raises
        ------
        RuntimeError
            On the default stream; if the graph holds a capture already.
        """
        self._native.capture_begin(pool=pool, capture_error_mode=capture_error_mode)

    def capture_end(self) -> None:
        """Stop recording; RuntimeError if an error has ended the capture before."""
        self._native.capture_end()

    def instantiate(self) -> None:
        """Make the graph ready for `replay`; needed only with `keep_graph`, and done by `replay` if not before."""
        self._native.instantiate()

    def replay(self) -> None:
        """Run the recorded work on the current stream, on the memory it was recorded with.

        On host the work has finished on return, and two threads cannot replay one graph at the same time
        (RuntimeError).
        """
        self._native.replay()

    def reset(self) -> None:
        """Delete what was recorded."""
        self._native.reset()

    def pool(self) -> Any:
        """Return the graph's memory pool, for other graphs to share."""
        return self._native.pool()

    def enable_debug_mode(self) -> None:
        """Keep what `debug_dump` needs."""
        self._native.enable_debug_mode()

    def debug_dump(self, debug_path: str) -> None:
        """Write the graph as a DOT file to `debug_path`."""
        self._native.debug_dump(debug_path)


class graph:
    """Context manager that records quartz work into a `Graph`.

    Parameters
    ----------
    quartz_graph : Graph
        The graph to record into.
    pool : tuple or None
        Memory pool to take memory from.
    stream : torch.Stream or None
        Stream to record on; None is a side stream of PyTorch's.
    capture_error_mode : str
        As in `Graph.capture_begin`.

    Raises
    ------
    RuntimeError
        At a call that a graph cannot hold: it reads a value on the host, its result has a shape that depends on values,
        it copies from or to memory of the CPU that is not pinned. The capture has then ended.

    Examples
    --------
    >>> x, g = torch.ones(4, device="quartz"), torch.quartz.Graph()
    >>> with torch.quartz.graph(g):
    ...     y = x + 1
    >>> g.replay()
    >>> y
    tensor([2., 2., 2., 2.], device='quartz:0')
    """

    def __init__(
        self,
        quartz_graph: Graph,
        pool: Any = None,
        stream: torch.Stream | None = None,
        capture_error_mode: str = "global",
    ):
        if _C.substrate() == "cuda":
            self._context: Any = torch.cuda.graph(
                quartz_graph._native,
                pool=pool,
                stream=None if stream is None else native_stream(stream),
                capture_error_mode=capture_error_mode,
            )
        else:
            self._context = _HostCapture(quartz_graph._native, pool, stream, capture_error_mode)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)


class _HostCapture:
    """What ``torch.cuda.graph`` is on cuda."""

    def __init__(self, graph: _HostGraph, pool: Any, stream: torch.Stream | None, capture_error_mode: str):
        self._graph, self._pool, self._mode = graph, pool, capture_error_mode
        self._stream = use_stream(Stream() if stream is None else stream)

    def __enter__(self) -> None:
        self._stream.__enter__()
        try:
            self._graph.capture_begin(self._pool, self._mode)
        except BaseException:
            self._stream.__exit__(None, None, None)
            raise

    def __exit__(self, kind: Any, *exception: Any) -> None:
        try:
            if kind is None:
                self._graph.capture_end()
            else:
                self._graph.capture_abort()
        finally:
            self._stream.__exit__(kind, *exception)


def graph_pool_handle() -> Any:
    """Return a new memory pool for graphs to share.

    Examples
    --------
    >>> pool = torch.quartz.graph_pool_handle()
    >>> g = torch.quartz.Graph()
    >>> with torch.quartz.graph(g, pool=pool):
    ...     x = torch.zeros(2, device="quartz")
    >>> g.pool() == pool
    True
    """
    return torch.cuda.graph_pool_handle() if _C.substrate() == "cuda" else _C.new_graph_pool()


def is_current_stream_capturing() -> bool:
    """Return whether the current stream is being recorded into a graph; on host, whether this thread is.

    Examples
    --------
    >>> torch.quartz.is_current_stream_capturing()
    False
    """
    return torch.cuda.is_current_stream_capturing() if _C.substrate() == "cuda" else _C.capturing_on_host()


def make_graphed_callables(callables: Any, sample_args: Any, **options: Any) -> Callable | tuple[Callable, ...]:
    """Return versions of functions or modules whose forward and backward run as graphs.

    Parameters
    ----------
    callables, sample_args, **options
        As for ``torch.cuda.make_graphed_callables``, with quartz tensors.

    Raises
    ------
    RuntimeError
        On host, whose graphs hold no backward pass.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     layer = torch.nn.Linear(4, 4, device="quartz")
    ...     fast = torch.quartz.make_graphed_callables(layer, (torch.ones(2, 4, device="quartz"),))
    """
    if _C.substrate() != "cuda":
        raise RuntimeError(
            "torch.quartz.make_graphed_callables needs the cuda substrate: a graph of the host substrate holds no "
            "backward pass. Capture the forward pass with torch.quartz.graph under torch.no_grad()"
        )
    return torch.cuda.make_graphed_callables(callables, sample_args, **options)
