"""What a graph cannot hold, and misuse: each is an error that leaves the thread, the device and the graph usable."""

import contextlib
import gc

import pytest
import torch
from graph_helpers import captured, fresh
from torch_quartz.testing import same_bits

REFUSED = {
    "item": (lambda x: x.sum().item(), "reads a value of a quartz tensor on the host"),
    "bool": (lambda x: bool((x > 0).any()), "reads a value of a quartz tensor on the host"),
    "equal": (lambda x: torch.equal(x, x), "reads a value of a quartz tensor on the host"),
    "cpu": (lambda x: x.cpu(), "a copy to the CPU can be recorded only into pinned memory"),
    "tolist": (lambda x: x.tolist(), "a copy to the CPU"),
    "print": (lambda x: repr(x), "graph capture"),
    "tensor": (lambda x: torch.tensor([1.0], device=x.device), "a copy from the CPU can be recorded only from pinned"),
    "nonzero": (lambda x: x.nonzero(), "shape depends on values"),
    "unique": (lambda x: torch.unique(x), "shape depends on values"),
    "mask": (lambda x: x[x > 0], "takes a mask as its index"),
    "mask put": (lambda x: x.index_put_((x > 0,), x.flatten()), "takes a mask as its index"),
    "repeat": (lambda x: x[0].repeat_interleave(x[0].long()), "shape depends on values"),
    "gradient": (lambda x: x.requires_grad_() * 2, "would record a gradient"),
    "synchronize": (lambda x: torch.quartz.synchronize(), "waits on the host"),
    "stream": (lambda x: torch.quartz.current_stream().synchronize(), "waits on the host"),
    "event": (lambda x: torch.quartz.current_stream().record_event().synchronize(), "waits on the host"),
    "alias": (lambda x: torch.quartz.native_alias(x), "hands out native memory"),
    "sparse": (lambda x: x.to_sparse(), "graph"),
    "compiled": (lambda x: COMPILED(x), "compile"),
    "replay": (lambda x: OTHER[0].replay(), "a graph holds no other"),
    "nested": (lambda x: OTHER[1].capture_begin(), "this thread captures another graph"),
}
OTHER = []


@torch.compile
def COMPILED(x):
    return x.sin() + 1


@pytest.mark.host
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_ends_the_capture(name):
    call, message = REFUSED[name]
    x, y, graph = fresh(4, 4), torch.zeros(4, device="quartz"), torch.quartz.Graph()
    if name == "compiled":
        COMPILED(fresh(4, 4))
    OTHER[:] = [captured(lambda: y + 1)[0], torch.quartz.Graph()]
    with pytest.raises(RuntimeError, match=message), torch.quartz.graph(graph):
        y.add_(1)
        call(x)
    assert not torch.quartz.is_current_stream_capturing() and not y.any()
    assert torch.quartz.current_stream() == torch.quartz.default_stream()
    assert (y + 1).sum().item() == 4  # the thread works on
    with torch.quartz.graph(graph):  # and the graph can be used
        z = y + 2
    graph.replay()
    assert z.sum().item() == 8


@pytest.mark.host
def test_an_error_that_is_swallowed_is_told_at_the_end():
    x, graph = fresh(4), torch.quartz.Graph()

    def swallow():
        with torch.quartz.graph(graph):
            y = x + 1
            with contextlib.suppress(RuntimeError):
                y.sum().item()
            assert not torch.quartz.is_current_stream_capturing()

    with pytest.raises(RuntimeError, match=r"the capture was ended by an error: .*aten::item reads a value"):
        swallow()
    with pytest.raises(RuntimeError, match="nothing was captured"):
        graph.replay()


def test_an_exception_leaves_no_capture_behind():
    graph, x = torch.quartz.Graph(), torch.zeros(4, device="quartz")
    if torch.quartz.substrate() == "host":
        with pytest.raises(ValueError, match="mine"), torch.quartz.graph(graph):
            x.add_(1)
            raise ValueError("mine")
        assert not x.any()
    dropped = torch.quartz.Graph()
    stream = torch.quartz.Stream()
    with torch.quartz.stream(stream):
        dropped.capture_begin()
        x.add_(1)
        assert torch.quartz.is_current_stream_capturing()
        if torch.quartz.substrate() == "cuda":
            dropped.capture_end()
        del dropped
        gc.collect()
    assert not torch.quartz.is_current_stream_capturing() and not x.any()


@pytest.mark.host
def test_a_call_that_fails_is_not_recorded():
    x, graph = fresh(4, 4), torch.quartz.Graph()
    with torch.quartz.graph(graph):
        try:
            y = x @ torch.ones(3, 3, device="quartz")
        except RuntimeError as error:
            assert "cannot be multiplied" in str(error)
        y = x + 1
    graph.replay()
    assert same_bits(y.cpu(), x.cpu() + 1)


@pytest.mark.host
def test_misuse():
    graph = torch.quartz.Graph()
    with pytest.raises(RuntimeError, match="a stream other than the default one"):
        graph.capture_begin()
    for call in (graph.replay, lambda: graph.debug_dump("x")):
        with pytest.raises(RuntimeError, match="nothing was captured"):
            call()
    with pytest.raises(RuntimeError, match="no capture is under way"):
        graph.capture_end()
    with pytest.raises(RuntimeError, match="capture_error_mode must be one of"):
        graph.capture_begin(capture_error_mode="loose")
    with pytest.raises(TypeError, match="pool must be a pair of integers"):
        graph.capture_begin(pool=3)
    x = fresh(4)
    with torch.quartz.graph(graph):
        x + 1
    with pytest.raises(RuntimeError, match="captured already"), torch.quartz.graph(graph):
        pass
    with pytest.raises(RuntimeError, match="instantiated already"):
        graph.instantiate()
    graph.reset()
    with pytest.raises(RuntimeError, match="nothing was captured"):
        graph.replay()


@pytest.mark.host
def test_a_capture_must_end_in_the_block_in_which_it_began():
    x, graph = torch.zeros(4, device="quartz"), torch.quartz.Graph()
    with torch.quartz.stream(torch.quartz.Stream()):
        with torch.inference_mode():
            graph.capture_begin()
        x.add_(1)  # not seen
        with pytest.raises(RuntimeError, match="begin and end it in the same block"):
            graph.capture_end()
        graph.reset()
        graph.capture_begin()
        with torch.inference_mode():
            y = x * 2
            graph.capture_end()
        z = y + 1  # inference_mode has restored the mark of a capture, but there is none
    assert not torch.quartz.is_current_stream_capturing() and z.tolist() == [3, 3, 3, 3]
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [4, 4, 4, 4]


@pytest.mark.host
def test_a_resized_storage_is_refused_by_the_replay():
    x = fresh(8)
    graph, _ = captured(lambda x: x + 1, x)
    x.untyped_storage().resize_(4)
    with pytest.raises(RuntimeError, match="was resized from 32 to 4 bytes after the capture"):
        graph.replay()


def test_changes_of_the_tensor_object_do_not_change_the_graph():
    x = fresh(2, 3)
    want = x.cpu() * 2
    graph, y = captured(lambda x: x * 2, x)
    x.t_()
    graph.replay()
    assert same_bits(y.cpu(), want)
    x.data = fresh(5)
    graph.replay()
    assert same_bits(y.cpu(), want)
