"""CUDA graphs of quartz work: record a sequence of calls once, then replay it in one launch. Only on cuda.

Quartz streams and memory are CUDA's, so PyTorch's own ``torch.cuda.CUDAGraph`` captures quartz operators as it
captures CUDA operators. The host substrate has no graphs and says so.
"""

from collections.abc import Callable
from typing import Any

import torch

from torch_quartz import _C
from torch_quartz.device.streams import native_stream


class Graph:
    """A captured sequence of quartz work.

    Parameters
    ----------
    keep_graph : bool
        Keep the graph after capture, so that it can be changed before it is instantiated.

    Raises
    ------
    RuntimeError
        On host.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     x = torch.ones(4, device="quartz")
    ...     g = torch.quartz.Graph()
    ...     with torch.quartz.graph(g):
    ...         y = x * 2
    ...     g.replay()
    """

    def __init__(self, keep_graph: bool = False):
        _require_cuda("Graph")
        self._native = torch.cuda.CUDAGraph(keep_graph)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Start recording the current stream, which must not be the default one.

        Parameters
        ----------
        pool : tuple or None
            Memory pool to take memory from, as `pool` or `graph_pool_handle` return it.
        capture_error_mode : str
            ``"global"``, ``"thread_local"`` or ``"relaxed"``: whose unsafe calls end the capture.
        """
        self._native.capture_begin(pool=pool, capture_error_mode=capture_error_mode)

    def capture_end(self) -> None:
        """Stop recording."""
        self._native.capture_end()

    def instantiate(self) -> None:
        """Make the graph ready for `replay`; needed only with `keep_graph`, and done by `replay` if not before."""
        self._native.instantiate()

    def replay(self) -> None:
        """Run the recorded work on the current stream, on the memory it was recorded with."""
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
        On host.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     x, g = torch.ones(4, device="quartz"), torch.quartz.Graph()
    ...     with torch.quartz.graph(g):
    ...         y = x + 1
    ...     g.replay()
    """

    def __init__(
        self,
        quartz_graph: Graph,
        pool: Any = None,
        stream: torch.Stream | None = None,
        capture_error_mode: str = "global",
    ):
        _require_cuda("graph")
        self._context = torch.cuda.graph(
            quartz_graph._native,
            pool=pool,
            stream=None if stream is None else native_stream(stream),
            capture_error_mode=capture_error_mode,
        )

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)


def graph_pool_handle() -> Any:
    """Return a new memory pool for graphs to share.

    Raises
    ------
    RuntimeError
        On host.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     pool = torch.quartz.graph_pool_handle()
    """
    _require_cuda("graph_pool_handle")
    return torch.cuda.graph_pool_handle()


def is_current_stream_capturing() -> bool:
    """Return whether the current stream is being recorded into a graph; never on host.

    Examples
    --------
    >>> torch.quartz.is_current_stream_capturing()
    False
    """
    return _C.substrate() == "cuda" and torch.cuda.is_current_stream_capturing()


def make_graphed_callables(callables: Any, sample_args: Any, **options: Any) -> Callable | tuple[Callable, ...]:
    """Return versions of functions or modules whose forward and backward run as graphs.

    Parameters
    ----------
    callables, sample_args, **options
        As for ``torch.cuda.make_graphed_callables``, with quartz tensors.

    Raises
    ------
    RuntimeError
        On host.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     layer = torch.nn.Linear(4, 4, device="quartz")
    ...     fast = torch.quartz.make_graphed_callables(layer, (torch.ones(2, 4, device="quartz"),))
    """
    _require_cuda("make_graphed_callables")
    return torch.cuda.make_graphed_callables(callables, sample_args, **options)


def _require_cuda(name: str) -> None:
    if _C.substrate() != "cuda":
        raise RuntimeError(
            f"torch.quartz.{name} needs the cuda substrate: graphs are CUDA graphs, and this process runs on host"
        )
