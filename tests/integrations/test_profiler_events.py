"""The event-based profiler, which asks the device itself for times, and PyTorch's record_function ranges in it."""

import torch


def work():
    x = torch.randn(64, 64, device="quartz", requires_grad=True)
    with torch.profiler.record_function("my range"):
        y = (x @ x).relu().sum()
    y.backward()


def test_device_times_without_kineto(capfd):
    work()
    with torch.autograd.profiler.profile(use_device="quartz", use_kineto=False) as profile:
        work()
    averages = {event.key: event for event in profile.key_averages()}
    assert {"aten::mm", "aten::relu", "my range", "MmBackward0"} <= set(averages)
    assert averages["aten::mm"].count == 3 and averages["aten::mm"].device_time_total > 0
    assert averages["my range"].device_time_total >= averages["aten::relu"].device_time_total
    assert "Exception" not in capfd.readouterr().err


def test_kineto_with_the_device_named(capfd):
    with torch.autograd.profiler.profile(use_device="quartz") as profile:
        work()
    assert "aten::mm" in {event.key for event in profile.key_averages()}
    assert "Exception" not in capfd.readouterr().err
