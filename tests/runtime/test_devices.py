"""Which devices there are and which one is current."""

import re

import pytest
import torch


def test_module_is_registered():
    assert torch.get_device_module("quartz") is torch.quartz
    assert torch.accelerator.current_accelerator() == torch.device("quartz")
    assert torch.quartz.is_available() and torch.accelerator.is_available()
    assert torch.quartz.device_count() == torch.accelerator.device_count() >= 1


def test_device_strings():
    assert torch.device("quartz").type == "quartz"
    assert torch.empty(1, device="quartz").device == torch.device("quartz", torch.quartz.current_device())
    assert torch.ones(1, device=torch.device("quartz", 0)).is_quartz
    assert torch.ones(1, device=0).device == torch.device("quartz:0")  # a bare index means the current accelerator
    assert torch.ones(2).quartz().device.type == "quartz"
    assert torch.nn.Linear(2, 2).quartz().weight.device.type == "quartz"
    assert torch.ones(2).untyped_storage().quartz().device.type == "quartz"


@pytest.mark.parametrize("bad", [7, 15, "quartz:7", torch.device("quartz", 9)])
def test_set_device_refuses_what_does_not_exist(bad):
    index = torch.device(bad).index if not isinstance(bad, int) else bad
    with pytest.raises(
        RuntimeError, match=rf"invalid device ordinal {index}: there (is 1 device|are \d+ devices) \(quartz:0"
    ):
        torch.quartz.set_device(bad)
    assert torch.quartz.current_device() == 0
    assert torch.ones(2, device="quartz").sum().item() == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.empty(2, device="quartz:7"),
        lambda: torch.ones(2).to("quartz:7"),
        lambda: torch.quartz.synchronize(7),
        lambda: torch.quartz.get_device_properties("quartz:7"),
        lambda: torch.quartz.current_stream(7),
        lambda: torch.quartz.Stream(7),
        lambda: torch.quartz.manual_seed_all(0) or torch.quartz.get_rng_state(7),
        lambda: torch.quartz.memory_allocated(7),
        lambda: torch.quartz.device(7).__enter__(),
    ],
)
def test_unknown_index_is_a_runtime_error(call):
    with pytest.raises(RuntimeError, match=r"invalid device ordinal 7\b"):
        call()
    assert torch.quartz.current_device() == 0
    assert torch.ones(2, device="quartz").sum().item() == 2


@pytest.mark.parametrize("call", [torch.quartz.set_device, torch.quartz.synchronize, torch.quartz.device])
def test_other_device_types_are_refused(call):
    with pytest.raises(ValueError, match="Expected a quartz device, but got: cpu"):
        call("cpu")
    with pytest.raises(RuntimeError, match=re.escape("Expected one of cpu, cuda")):
        call("quarz")


def test_device_context_restores_after_an_error():
    with pytest.raises(KeyError), torch.quartz.device(0):
        raise KeyError
    assert torch.quartz.current_device() == 0


def test_device_context_accepts_none_and_negative():
    for nothing in (None, -1):
        with torch.quartz.device(nothing):
            assert torch.quartz.current_device() == 0


def test_device_of():
    with torch.quartz.device_of(torch.ones(1, device="quartz:0")):
        assert torch.quartz.current_device() == 0
    with torch.quartz.device_of(torch.ones(1)):
        assert torch.quartz.current_device() == 0


def test_properties():
    properties = torch.quartz.get_device_properties("quartz:0")
    assert properties.name == torch.quartz.get_device_name(0)
    assert properties.total_memory == torch.quartz.mem_get_info(0)[1]
    assert properties.multi_processor_count >= 1
    assert torch.quartz.get_device_capability(0) == (properties.major, properties.minor)
    assert torch.quartz.is_bf16_supported()


@pytest.mark.host
def test_host_properties():
    assert torch.quartz.get_device_name().startswith("Quartz host")
    assert torch.quartz.get_device_capability() == (0, 0)
    assert torch.quartz.native_device(0) == torch.device("cpu")


def test_default_device():
    with torch.device("quartz"):
        assert torch.ones(2).device.type == "quartz"
        assert torch.nn.Linear(2, 2).weight.device.type == "quartz"
        assert torch.arange(3).device.type == "quartz"
    try:
        torch.set_default_device("quartz:0")
        assert torch.zeros(2).device == torch.device("quartz:0")
    finally:
        torch.set_default_device(None)


@pytest.mark.two_devices
class TestTwoDevices:
    def test_set_device_is_per_thread(self):
        import threading

        torch.quartz.set_device(1)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.quartz.current_device()))
        thread.start()
        thread.join()
        assert torch.quartz.current_device() == 1
        assert torch.empty(1, device="quartz").device.index == 1
        torch.quartz.set_device("quartz:0")
        assert seen == [0]

    def test_contexts(self):
        x = torch.ones(2, device="quartz:1")
        with torch.quartz.device_of(x):
            assert torch.quartz.current_device() == 1
            with torch.quartz.device("quartz:0"):
                assert torch.empty(1, device="quartz").device.index == 0
            assert torch.quartz.current_device() == 1
        assert torch.quartz.current_device() == 0
        with torch.accelerator.device_index(1):
            assert torch.quartz.current_device() == 1

    def test_copies_between_devices(self):
        x = torch.randn(5, 7, device="quartz:0")
        y = x.to("quartz:1", non_blocking=True)
        torch.quartz.synchronize(1)
        assert y.device.index == 1 and y.data_ptr() != x.data_ptr()
        assert torch.equal(x.cpu(), y.cpu())
        z = torch.empty(7, 5, device="quartz:1").t()
        z.copy_(x)
        assert torch.equal(z.cpu(), x.cpu())
        assert (y + 1).device.index == 1

    def test_mixed_devices_are_an_error_that_names_both(self):
        x, y = torch.ones(2, device="quartz:0"), torch.ones(2, device="quartz:1")
        with pytest.raises(RuntimeError, match=r"quartz:0.*quartz:1|quartz:1.*quartz:0"):
            x + y
        assert (x + y.to(x.device)).tolist() == [2, 2]

    def test_generators_are_separate(self):
        torch.manual_seed(3)
        a = torch.rand(4, device="quartz:0")
        b = torch.rand(4, device="quartz:1")
        assert torch.equal(a.cpu(), b.cpu())
        torch.quartz.manual_seed(4)
        assert torch.quartz.initial_seed() == 4
        with torch.quartz.device(1):
            assert torch.quartz.initial_seed() == 3

    def test_memory_is_counted_per_device(self):
        before = [torch.quartz.memory_allocated(i) for i in (0, 1)]
        x = torch.empty(1 << 20, dtype=torch.uint8, device="quartz:1")
        after = [torch.quartz.memory_allocated(i) for i in (0, 1)]
        assert after[0] == before[0] and after[1] - before[1] == x.nbytes

    def test_data_parallel_backward(self):
        w = torch.randn(3, 3, requires_grad=True)
        loss = sum((w.to(f"quartz:{i}") * (i + 1)).sum().to("quartz:0") for i in (0, 1))
        loss.backward()
        assert torch.equal(w.grad, torch.full((3, 3), 3.0))

    def test_saved_index_is_restored(self, tmp_path):
        torch.save(torch.ones(2, device="quartz:1"), tmp_path / "t.pt")
        assert torch.load(tmp_path / "t.pt").device.index == 1
        assert torch.load(tmp_path / "t.pt", map_location={"quartz:1": "quartz:0"}).device.index == 0

    def test_peer_access(self):
        assert torch.quartz.can_device_access_peer(0, 1) in (True, False)


@pytest.mark.host
def test_two_host_devices(run_python):
    # The tests marked two_devices, in a process that has them.
    code = f"""
    import sys, pytest
    sys.exit(pytest.main(["-q", "-m", "two_devices", "-p", "no:cacheprovider", {__file__!r}.rpartition("/")[0]]))
    """
    output = run_python(code, environment={"TORCH_QUARTZ_HOST_DEVICES": "2"})
    assert re.search(r"\d+ passed", output) and "failed" not in output, output


def test_an_index_beyond_64_bits_is_no_device():
    for call in (torch.quartz.set_device, torch.quartz.synchronize, torch.quartz.memory_allocated):
        with pytest.raises(RuntimeError, match=f"invalid device ordinal {2**70}"):
            call(2**70)


@pytest.mark.parametrize("index", [100, 128, 200, 254])
def test_an_index_of_more_than_seven_bits_is_not_another_device(index):
    # PyTorch keeps eight bits of an index, so that 200 arrives as -56 (and 255 as -1, which is no index at all)
    for call in (
        lambda device: torch.empty(1, device=device),
        lambda device: torch.ones(1).to(device),
        lambda device: torch.quartz.memory_allocated(device),
        lambda device: torch.Generator(device),
    ):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            call(f"quartz:{index}")
    assert torch.ones(1, device="quartz").item() == 1


@pytest.mark.parametrize("name", ["hann", "hamming", "blackman", "bartlett", "kaiser"])
def test_windows_are_made_on_the_device(name):
    window = getattr(torch, f"{name}_window")
    got = window(5, device="quartz")
    assert got.device.type == "quartz"
    torch.testing.assert_close(got.cpu(), window(5))


@pytest.mark.parametrize("dtype", [torch.uint1, torch.uint4, torch.int4, torch.int7])
def test_integers_of_less_than_a_byte_are_copied(dtype):
    values = torch.tensor([0, 1, 1, 0], dtype=torch.uint8).view(dtype)
    moved = values.to("quartz")
    assert moved.dtype == dtype and moved.device.type == "quartz"
    assert torch.equal(moved.cpu().view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(moved.clone().cpu().view(torch.uint8), values.view(torch.uint8))
