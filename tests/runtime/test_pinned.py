"""Pinned memory and copies with non_blocking (case A7)."""

import pytest
import torch


def test_pinned_allocation():
    for x in (
        torch.empty(8, pin_memory=True),
        torch.zeros(8, pin_memory=True),
        torch.ones(8).pin_memory(),
        torch.ones(8).pin_memory("quartz"),
        torch.empty_like(torch.ones(3), pin_memory=True),
    ):
        assert x.is_pinned() and x.device.type == "cpu"
    assert not torch.ones(8).is_pinned()
    x = torch.arange(8.0).pin_memory()
    assert x.pin_memory() is x and x.tolist() == list(range(8))


def test_only_cpu_tensors_are_pinned():
    with pytest.raises(RuntimeError, match="pin"):
        torch.ones(2, device="quartz").pin_memory()
    assert not torch.ones(2, device="quartz").is_pinned()


def test_views_of_pinned_memory():
    x = torch.arange(10.0).pin_memory()
    assert x[3:].is_pinned()
    assert x[::2].to("quartz", non_blocking=True).tolist() == [0, 2, 4, 6, 8]


def test_into_pageable_memory_without_a_synchronize():
    # As CUDA does in practice: the copy is complete when the call returns.
    size = 1024
    destination = torch.empty(size, size)
    source = torch.empty(size, size, device="quartz")
    for value in range(100):
        source.fill_(value)
        destination.copy_(source, non_blocking=True)
        assert destination[0, 0] == value and destination[-1, -1] == value and destination.eq(value).all()


def test_to_the_cpu_gives_pinned_memory():
    x = torch.randn(512, 512, device="quartz")
    y = x.to("cpu", non_blocking=True)
    torch.quartz.synchronize()
    assert y.is_pinned() and torch.equal(y, x.cpu())
    assert not x.to("cpu").is_pinned()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_to_the_device(pinned, non_blocking):
    x = torch.randn(64, 33)
    source = x.pin_memory() if pinned else x.clone()
    y = source.to("quartz", non_blocking=non_blocking)
    torch.quartz.synchronize()
    source.zero_()
    assert torch.equal(y.cpu(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.complex64])
@pytest.mark.parametrize("transposed", [False, True])
def test_copies_convert_and_rearrange(dtype, transposed):
    x = torch.arange(12.0).reshape(3, 4)
    source = x.to("quartz")
    destination = torch.empty(4, 3, dtype=dtype).t() if transposed else torch.empty(3, 4, dtype=dtype)
    destination.copy_(source, non_blocking=True)
    torch.quartz.synchronize()
    assert torch.equal(destination, x.to(dtype))
    back = torch.empty(3, 4, dtype=dtype, device="quartz").copy_(x, non_blocking=True)
    assert torch.equal(back.cpu(), x.to(dtype))
    assert torch.empty(2, 3, 4, device="quartz").copy_(x).cpu().equal(x.expand(2, 3, 4))


def test_reusing_a_pinned_buffer():
    # A pinned block that a pending copy reads must not be handed out again before the copy is done.
    for value in range(50):
        buffer = torch.full((4096,), float(value)).pin_memory()
        moved = buffer.to("quartz", non_blocking=True)
        del buffer
        torch.full((4096,), -1.0).pin_memory()
        assert moved.eq(value).all().item()


def test_host_cache_can_be_emptied():
    x = torch.ones(1000).pin_memory()
    del x
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()
    assert torch.ones(4).pin_memory().sum() == 4


def test_nested_structures_of_a_data_loader():
    from torch.utils.data._utils.pin_memory import pin_memory

    pinned = pin_memory({"a": [torch.ones(2), "text"], "b": (torch.zeros(1), 3)})
    assert pinned["a"][0].is_pinned() and pinned["b"][0].is_pinned() and pinned["a"][1] == "text"


@pytest.mark.host
def test_a_fork_while_other_threads_pin_memory(run_python):
    # The lock of the allocator may be held by another thread at the moment of the fork.
    run_python(
        """
        import os, signal, threading, torch, torch_quartz
        keep = [torch.empty(10, pin_memory=True) for _ in range(10)]
        done = threading.Event()
        def busy():
            while not done.is_set():
                [torch.empty(10, pin_memory=True).is_pinned() for _ in range(50)]
        threads = [threading.Thread(target=busy) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)  # a child that hangs ends with SIGALRM
                keep.clear()
                torch.empty(10, pin_memory=True)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        done.set()
        """
    )
