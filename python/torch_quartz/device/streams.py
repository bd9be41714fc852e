"""Streams and events. On cuda they are CUDA's own, under the same ids; on host every call is done when it returns."""

from typing import Any

import torch

from torch_quartz import _C
from torch_quartz.device._utils import DeviceLike, _checked_index


class _OfQuartz(type):
    """Metaclass of `Stream` and `Event`: their instances are PyTorch's own objects that belong to a quartz device.

    Some of PyTorch's functions (``Event.elapsed_time``) take no subclass, and others (``Stream.record_event``) return
    none, so the two classes make plain ``torch.Stream`` and ``torch.Event`` objects and only answer for them in
    ``isinstance``.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls.__module__ != __name__:
            return super().__instancecheck__(instance)  # a user's subclass
        return isinstance(instance, cls.__base__) and instance.device.type == "quartz"


class Stream(torch.Stream, metaclass=_OfQuartz):
    """A queue of work on one device: makes a ``torch.Stream`` of a quartz device.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.
    priority : int
        Lower is more urgent; values outside the device's range are brought into it.
    stream_id, device_index, device_type : int
        Names an existing stream instead, as the attributes of a stream give them.

    Examples
    --------
    >>> queue = torch.quartz.Stream()
    >>> with torch.quartz.stream(queue):
    ...     y = torch.ones(2, device="quartz") * 2
    >>> queue.synchronize()
    >>> isinstance(queue, torch.quartz.Stream), isinstance(torch.accelerator.current_stream(), torch.quartz.Stream)
    (True, True)
    """

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **existing: int) -> "Stream":
        kind = torch.Stream if cls is Stream else cls
        if existing:
            return torch.Stream.__new__(kind, priority=priority, **existing)
        return torch.Stream.__new__(kind, device=torch.device("quartz", _checked_index(device)), priority=priority)


class Event(torch.Event, metaclass=_OfQuartz):
    """A mark in a stream, to wait for, to ask whether work is done, to measure time: makes a ``torch.Event`` of quartz.

    Parameters
    ----------
    enable_timing : bool
        Whether ``elapsed_time`` works.
    blocking : bool
        Whether ``synchronize`` sleeps instead of spinning.
    interprocess : bool
        Whether other processes may open the event; never with timing.

    Examples
    --------
    >>> start, end = torch.quartz.Event(enable_timing=True), torch.quartz.Event(enable_timing=True)
    >>> start.record()
    >>> y = torch.ones(1000, device="quartz").sum()
    >>> end.record()
    >>> end.synchronize()
    >>> start.elapsed_time(end) >= 0  # milliseconds
    True
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        kind = torch.Event if cls is Event else cls
        return torch.Event.__new__(
            kind, device="quartz", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def current_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the stream that new work on a device goes to in this thread.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> torch.quartz.current_stream() == torch.quartz.default_stream()
    True
    """
    return torch.accelerator.current_stream(_checked_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the stream of a device that is current unless another was chosen.

    Parameters
    ----------
    device : torch.device, str, int or None
        None is the current device.

    Examples
    --------
    >>> torch.quartz.default_stream().device.type
    'quartz'
    """
    stream_id, device_index, device_type = _C.default_stream(_checked_index(device))
    return Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream and its device current in this thread; prefer the context manager `stream`.

    Parameters
    ----------
    stream : torch.Stream or None
        None changes nothing.

    Examples
    --------
    >>> torch.quartz.set_stream(torch.quartz.default_stream())
    """
    if stream is not None:
        torch.accelerator.set_stream(_checked_stream(stream))


class StreamContext:
    """Context manager that makes a stream and its device current; `stream` makes one.

    Parameters
    ----------
    stream : torch.Stream or None
        None changes nothing.

    Examples
    --------
    >>> queue = torch.quartz.Stream()
    >>> with torch.quartz.StreamContext(queue):
    ...     torch.quartz.current_stream() == queue
    True
    """

    def __init__(self, stream: torch.Stream | None):
        self.stream = None if stream is None else _checked_stream(stream)
        self._previous: list[tuple[int, torch.Stream]] = []  # a stack: one context may be entered twice

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            self._previous.append((_C.current_device(), current_stream(self.stream.device_index)))
            set_stream(self.stream)
        return self.stream

    def __exit__(self, *exception: Any) -> None:
        if self.stream is not None:
            device_index, previous = self._previous.pop()
            set_stream(previous)
            _C.set_device(device_index)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Return a context manager that makes a stream and its device current.

    Parameters
    ----------
    stream : torch.Stream or None
        None changes nothing.

    Examples
    --------
    >>> with torch.quartz.stream(torch.quartz.Stream()):
    ...     y = torch.zeros(3, device="quartz") + 1
    """
    return StreamContext(stream)


def get_stream_from_external(data_ptr: int, device: DeviceLike = None) -> torch.Stream:
    """Return the stream behind a ``cudaStream_t`` made by another library; only on cuda.

    Parameters
    ----------
    data_ptr : int
        The ``cudaStream_t`` as an integer; its owner keeps it alive.
    device : torch.device, str, int or None
        The device it was made on, None is the current one.

    Raises
    ------
    RuntimeError
        On host, which has no CUDA streams.

    Examples
    --------
    >>> if torch.quartz.substrate() == "cuda":
    ...     queue = torch.quartz.get_stream_from_external(torch.cuda.Stream().cuda_stream)
    """
    index = _checked_index(device)
    if _C.substrate() != "cuda":
        raise RuntimeError("torch.quartz.get_stream_from_external needs the cuda substrate; this process runs on host")
    native = torch.cuda.get_stream_from_external(data_ptr, index)
    return Stream(stream_id=native.stream_id, device_index=index, device_type=_device_type("PrivateUse1"))


def native_stream(stream: torch.Stream) -> Any:
    """Return the ``torch.cuda.Stream`` that a quartz stream is, None on host.

    Parameters
    ----------
    stream : torch.Stream
        A quartz stream.

    Examples
    --------
    >>> queue = torch.quartz.native_stream(torch.quartz.current_stream())
    >>> (queue is None) == (torch.quartz.substrate() == "host")
    True
    """
    stream = _checked_stream(stream)
    if _C.substrate() != "cuda":
        return None
    return torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=_device_type("CUDA")
    )


def _device_type(name: str) -> int:
    return int(getattr(torch._C._autograd.DeviceType, name))


def _checked_stream(stream: torch.Stream) -> torch.Stream:
    if not isinstance(stream, torch.Stream):
        raise TypeError(f"Expected a torch.quartz.Stream, but got: {type(stream).__name__}")
    if stream.device.type != "quartz":
        raise ValueError(f"Expected a stream of a quartz device, but got a stream of: {stream.device}")
    return stream
