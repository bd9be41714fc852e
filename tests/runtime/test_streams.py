"""Streams and events."""

import time

import pytest
import torch


def test_kinds():
    stream, event = torch.quartz.Stream(), torch.quartz.Event()
    assert isinstance(stream, torch.Stream) and isinstance(stream, torch.quartz.Stream)
    assert isinstance(event, torch.Event) and isinstance(event, torch.quartz.Event)
    assert issubclass(torch.quartz.Stream, torch.Stream) and issubclass(torch.quartz.Event, torch.Event)
    assert isinstance(torch.Stream(device="quartz"), torch.quartz.Stream)
    assert isinstance(torch.accelerator.current_stream(), torch.quartz.Stream)
    assert isinstance(stream.record_event(), torch.quartz.Event)
    assert stream.device == torch.device("quartz:0")


def test_users_may_subclass():
    class Named(torch.quartz.Stream):
        name = "mine"

    stream = Named()
    assert stream.name == "mine" and type(stream) is Named and stream.device.type == "quartz"
    assert isinstance(stream, Named) and not isinstance(torch.quartz.Stream(), Named)


def test_default_and_current_stream():
    assert torch.quartz.current_stream() == torch.quartz.default_stream()
    assert torch.quartz.current_stream("quartz:0") == torch.quartz.current_stream(0)
    assert hash(torch.quartz.current_stream()) == hash(torch.quartz.default_stream())


def test_stream_context():
    default, side = torch.quartz.default_stream(), torch.quartz.Stream()
    assert side != default
    with torch.quartz.stream(side) as entered:
        assert entered == side and torch.quartz.current_stream() == side
        with torch.quartz.stream(default):
            assert torch.quartz.current_stream() == default
        assert torch.quartz.current_stream() == side
        with torch.quartz.stream(None):
            assert torch.quartz.current_stream() == side
    assert torch.quartz.current_stream() == default
    with side:
        assert torch.quartz.current_stream() == side
    assert torch.quartz.current_stream() == default


def test_stream_context_after_an_error():
    context = torch.quartz.stream(torch.quartz.Stream())
    with pytest.raises(KeyError), context:
        raise KeyError
    with context, context:  # entered twice
        pass
    assert torch.quartz.current_stream() == torch.quartz.default_stream()


def test_set_stream():
    side = torch.quartz.Stream()
    torch.quartz.set_stream(side)
    assert torch.quartz.current_stream() == side
    torch.quartz.set_stream(None)
    assert torch.quartz.current_stream() == side
    torch.quartz.set_stream(torch.quartz.default_stream())
    assert torch.quartz.current_stream() == torch.quartz.default_stream()


def test_existing_stream_by_id():
    side = torch.quartz.Stream()
    same = torch.quartz.Stream(stream_id=side.stream_id, device_index=side.device_index, device_type=side.device_type)
    assert same == side


@pytest.mark.parametrize("bad", [3, "stream", torch.device("quartz")])
def test_what_is_no_stream_is_refused(bad):
    with pytest.raises(TypeError, match=r"Expected a torch.quartz.Stream, but got: "):
        torch.quartz.set_stream(bad)
    with pytest.raises(TypeError, match=r"Expected a torch.quartz.Stream, but got: "):
        torch.quartz.stream(bad)


@pytest.mark.parametrize("priority", [0, -1, -100, 100])
def test_priorities(priority):
    stream = torch.quartz.Stream(priority=priority)
    with torch.quartz.stream(stream):
        assert (torch.ones(3, device="quartz") * 2).sum().item() == 6


def test_work_on_two_streams():
    x = torch.randn(256, 256, device="quartz")
    expected = (x.cpu() @ x.cpu()).sum()
    side = torch.quartz.Stream()
    side.wait_stream(torch.quartz.current_stream())
    with torch.quartz.stream(side):
        y = x @ x
        y.record_stream(side)
        done = side.record_event()
    torch.quartz.current_stream().wait_event(done)
    torch.testing.assert_close(y.sum().cpu(), expected, rtol=1e-3, atol=1e-2)
    side.synchronize()
    assert side.query() and done.query()


def test_event_life():
    event = torch.quartz.Event()
    assert event.query()  # an event that was never recorded is done, as on CUDA
    event.synchronize()
    event.record()
    event.wait()
    event.wait(torch.quartz.Stream())
    event.record(torch.quartz.Stream())
    event.synchronize()
    assert event.query()


def test_elapsed_time_is_in_milliseconds():
    start, end = (torch.quartz.Event(enable_timing=True) for _ in range(2))
    start.record()
    time.sleep(0.02)
    end.record()
    end.synchronize()
    assert 15 < start.elapsed_time(end) < 2000
    mixed = torch.Event("quartz", enable_timing=True)
    mixed.record()
    mixed.synchronize()
    assert end.elapsed_time(mixed) >= 0


def test_elapsed_time_needs_timing_and_a_record():
    timed, untimed = torch.quartz.Event(enable_timing=True), torch.quartz.Event()
    with pytest.raises((RuntimeError, ValueError)):
        timed.elapsed_time(torch.quartz.Event(enable_timing=True))
    timed.record()
    untimed.record()
    with pytest.raises((RuntimeError, ValueError)):
        timed.elapsed_time(untimed)
    assert torch.ones(2, device="quartz").sum().item() == 2


def test_native_stream():
    native = torch.quartz.native_stream(torch.quartz.current_stream())
    if torch.quartz.substrate() == "host":
        assert native is None
        with pytest.raises(RuntimeError, match="needs the cuda substrate"):
            torch.quartz.get_stream_from_external(0)
    else:
        assert native == torch.cuda.current_stream()
        side = torch.quartz.Stream()
        with torch.quartz.stream(side):
            assert torch.cuda.current_stream() == torch.quartz.native_stream(side)
        external = torch.quartz.get_stream_from_external(torch.cuda.Stream().cuda_stream)
        with torch.quartz.stream(external):
            assert (torch.ones(3, device="quartz") * 2).sum().item() == 6


def test_backward_runs_on_the_stream_of_forward():
    side = torch.quartz.Stream()
    x = torch.ones(4, device="quartz", requires_grad=True)
    torch.quartz.synchronize()
    with torch.quartz.stream(side):
        seen = []
        y = x * 3
        y.register_hook(lambda grad: seen.append(torch.quartz.current_stream()))
        y.sum().backward()
    torch.quartz.synchronize()
    assert seen == [side] and x.grad.tolist() == [3, 3, 3, 3]


class TestGraphs:
    def test_capture_and_replay(self):
        x = torch.zeros(4, device="quartz")
        graph = torch.quartz.Graph()
        with torch.quartz.graph(graph):
            assert torch.quartz.is_current_stream_capturing()
            y = x * 2 + 1
        x.fill_(3)
        graph.replay()
        torch.quartz.synchronize()
        assert y.tolist() == [7, 7, 7, 7]

    def test_capture_on_a_given_stream_and_pool(self):
        side, pool = torch.quartz.Stream(), torch.quartz.graph_pool_handle()
        x = torch.ones(4, device="quartz")
        first, second = torch.quartz.Graph(), torch.quartz.Graph()
        with torch.quartz.graph(first, pool=pool, stream=side):
            assert torch.quartz.current_stream() == side
            y = x + 1
        with torch.quartz.graph(second, pool=pool, stream=side):
            z = y * 2
        first.replay()
        second.replay()
        torch.quartz.synchronize()
        assert z.tolist() == [4, 4, 4, 4] and first.pool() == pool

    def test_random_numbers_differ_between_replays(self):
        graph = torch.quartz.Graph()
        with torch.quartz.graph(graph):
            x = torch.rand(100, device="quartz")
        graph.replay()
        first = x.clone()
        graph.replay()
        assert not torch.equal(first, x)

    @pytest.mark.cuda
    def test_graphed_training_step(self):
        layer = torch.nn.Linear(4, 4).to("quartz")
        x = torch.randn(2, 4, device="quartz")
        graphed = torch.quartz.make_graphed_callables(torch.nn.Linear(4, 4).to("quartz"), (x.clone(),))
        graphed.load_state_dict(layer.state_dict())
        graphed(x).sum().backward()
        layer(x).sum().backward()
        torch.testing.assert_close(graphed.weight.grad, layer.weight.grad)
