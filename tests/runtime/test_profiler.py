"""torch.profiler, named ranges and the operator counters."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile


def work():
    x = torch.ones(32, 32, device="quartz", requires_grad=True)
    with torch.quartz.nvtx.range("my {} range", "own"):
        y = (x @ x).relu().sum()
    y.backward()
    torch.quartz.synchronize()


def names(prof):
    return {event.key for event in prof.key_averages()}


def test_operators_are_visible():
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        work()
    assert {"aten::mm", "aten::relu", "aten::sum", "my own range"} <= names(prof)
    counts = {event.key: event.count for event in prof.key_averages()}
    assert counts["aten::relu"] == 1  # the native call below the fallback is not a second event
    assert any("Backward" in name for name in names(prof))
    shapes = [event.input_shapes for event in prof.events() if event.name == "aten::relu"]
    assert shapes == [[[32, 32]]]
    assert "aten::mm" in prof.key_averages().table(sort_by="self_cpu_time_total")


def test_default_activities():
    with profile() as prof:
        work()
    assert "aten::mm" in names(prof)


def test_with_the_device_activity():
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as prof:
        work()
    assert "aten::mm" in names(prof)
    # The device's own name for the activity is newer than PyTorch 2.11.
    assert getattr(ProfilerActivity, "QUARTZ", ProfilerActivity.PrivateUse1) == ProfilerActivity.PrivateUse1


@pytest.mark.cuda
def test_cuda_kernels_are_visible():
    work()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        work()
    # PyTorch gives all GPU events the type of the registered out-of-tree device.
    kernels = [event for event in prof.events() if event.device_type == torch.autograd.DeviceType.PrivateUse1]
    assert kernels and sum(event.device_time for event in kernels) > 0
    averages = {event.key: event for event in prof.key_averages()}
    assert averages["aten::mm"].device_time_total > 0 and averages["aten::relu"].device_time_total > 0
    assert "CUDA time" in prof.key_averages().table(sort_by="self_device_time_total")


def test_chrome_trace(tmp_path):
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as prof:
        work()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_memory_is_reported():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        x = torch.empty(1 << 20, dtype=torch.uint8, device="quartz")
        del x
    usage = {event.name: event.cpu_memory_usage + event.device_memory_usage for event in prof.events()}
    assert usage["aten::empty"] == 1 << 20 and usage["[memory]"] == -(1 << 20)


def test_schedule():
    seen = []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=1),
        on_trace_ready=lambda prof: seen.append(names(prof)),
    ) as prof:
        for _ in range(3):
            work()
            prof.step()
    assert len(seen) == 1 and "aten::mm" in seen[0]


def test_legacy_profiler_entry_points():
    with torch.autograd.profiler.profile(use_device="quartz") as prof:
        work()
    assert "aten::mm" in {event.key for event in prof.key_averages()}
    with torch.autograd.profiler.record_function("named"):
        work()


class TestRanges:
    def test_push_and_pop_count(self):
        nvtx = torch.quartz.nvtx
        assert [nvtx.range_push("a"), nvtx.range_push("b")] == [0, 1]
        assert [nvtx.range_pop(), nvtx.range_pop(), nvtx.range_pop()] == [1, 0, -1]

    def test_all_kinds_are_recorded(self):
        nvtx = torch.quartz.nvtx

        @nvtx.range("decorated")
        def function():
            return torch.ones(1, device="quartz")

        with profile(activities=[ProfilerActivity.CPU]) as prof:
            nvtx.range_push("pushed")
            handle = nvtx.range_start("started")
            nvtx.mark("marked")
            nvtx.range_pop()
            nvtx.range_end(handle)
            function()
            function()
        counts = {event.key: event.count for event in prof.key_averages()}
        assert counts["pushed"] == counts["started"] == counts["marked"] == 1 and counts["decorated"] == 2

    def test_a_range_closes_after_an_error(self):
        with pytest.raises(KeyError), torch.quartz.nvtx.range("x"):
            raise KeyError


class TestOpCounts:
    def test_fallback_calls_are_counted(self):
        x = torch.ones(4, device="quartz")
        torch.quartz.reset_op_counts()
        assert torch.quartz.op_counts() == {}
        for _ in range(3):
            x.exp()
        counts = torch.quartz.op_counts()
        assert sum(counts["aten::exp"]) == 3
        assert counts["aten::exp"].fallback == 3 and counts["aten::exp"].own == 0
        assert next(iter(counts)) == "aten::exp"
        torch.quartz.reset_op_counts()
        assert torch.quartz.op_counts() == {}

    def test_own_kernels_are_counted(self):
        torch.quartz.reset_op_counts()
        torch.empty(4, device="quartz").view(2, 2)
        assert all(count.own for count in torch.quartz.op_counts().values())

    def test_other_devices_are_not_counted(self):
        torch.quartz.reset_op_counts()
        torch.ones(4).exp()
        assert torch.quartz.op_counts() == {}
