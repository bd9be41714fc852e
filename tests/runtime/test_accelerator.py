"""torch.accelerator and the parts of PyTorch that ask the current accelerator or its module for something."""

import copy
import inspect
import pickle

import pytest
import torch

A = torch.accelerator


def test_current_accelerator():
    assert A.current_accelerator() == torch.device("quartz") == A.current_accelerator(check_available=True)
    assert torch.get_device_module() is torch.quartz
    assert torch._C._get_accelerator() == torch.device("quartz")
    assert A.current_device_index() == torch.quartz.current_device()
    A.set_device_index(0)
    A.synchronize()
    A.synchronize("quartz:0")


def test_bad_indices():
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        A.set_device_index(7)
    with pytest.raises(ValueError, match="cpu doesn't match the current accelerator quartz"):
        A.current_stream("cpu")
    assert A.current_device_index() == 0


def test_streams():
    side = torch.Stream(device="quartz")
    A.set_stream(side)
    assert A.current_stream() == side == torch.quartz.current_stream()
    A.set_stream(torch.quartz.default_stream())
    assert A.current_stream() == torch.quartz.default_stream()


def test_memory_has_the_same_numbers():
    x = torch.empty(1 << 20, device="quartz")
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
        "memory_stats",
    ):
        assert getattr(A, name)() == getattr(torch.quartz, name)(), name
    assert A.get_memory_info()[1] == torch.quartz.mem_get_info()[1]
    A.reset_peak_memory_stats()
    A.reset_accumulated_memory_stats()
    A.empty_cache()
    del x


def test_capability_lists_dtypes():
    dtypes = A.get_device_capability()["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.int64} <= set(dtypes)


def test_every_public_function_takes_quartz():
    # A new function of torch.accelerator must be looked at here.
    known = {
        "Graph", "current_accelerator", "current_device_idx", "current_device_index", "current_stream", "device_count",
        "device_index", "empty_cache", "empty_host_cache", "get_device_capability", "get_memory_info", "is_available",
        "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved", "memory_stats",
        "reset_accumulated_memory_stats", "reset_peak_memory_stats", "set_device_idx", "set_device_index",
        "set_stream", "synchronize",
    }  # fmt: skip
    assert set(A.__all__) <= known


@pytest.mark.skipif(not hasattr(A, "Graph"), reason="torch.accelerator.Graph came with PyTorch 2.12")
def test_graph_captures_and_replays(tmp_path):
    x = torch.zeros(4, device="quartz")
    graph = A.Graph(keep_graph=True, capture_error_mode="thread_local")
    with torch.Stream("quartz"), graph:
        y = x * 2 + 1
    graph.debug_dump(str(tmp_path / "graph.dot"))
    x.fill_(3)
    graph.replay()
    torch.quartz.synchronize()
    assert y.tolist() == [7, 7, 7, 7] and "digraph" in (tmp_path / "graph.dot").read_text()


def test_benchmark_timer():
    from torch.utils.benchmark import Timer

    timer = Timer("x + 1", globals={"x": torch.ones(4, device="quartz")})
    assert timer.timeit(10).mean > 0


def test_generators_are_pickled_and_copied():
    generator = torch.Generator("quartz").manual_seed(4)
    torch.rand(10, device="quartz", generator=generator)
    for twin in (pickle.loads(pickle.dumps(generator)), copy.deepcopy(generator)):
        assert twin.device == generator.device and twin.initial_seed() == 4
        assert torch.equal(twin.get_state(), generator.get_state())
        again = generator.clone_state()
        assert torch.equal(
            torch.rand(5, device="quartz", generator=twin), torch.rand(5, device="quartz", generator=again)
        )


def test_type_strings():
    x = torch.ones(2, device="quartz")
    assert x.type() == "torch.quartz.FloatTensor" and x.half().type() == "torch.quartz.HalfTensor"
    assert x.cpu().type(x.half().type()).type() == "torch.quartz.HalfTensor"
    assert repr(x) == "tensor([1., 1.], device='quartz:0')"
    assert "device='quartz:0'" in repr(torch.nn.Parameter(x))


def test_make_tensor_and_assert_close():
    x = torch.testing.make_tensor((3, 4), dtype=torch.float32, device="quartz")
    torch.testing.assert_close(x, x.clone())
    with pytest.raises(AssertionError, match="device"):
        torch.testing.assert_close(x, x.cpu())
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        torch.testing.assert_close(x, x + 1)


def test_parameter_vectors_and_module_utilities():
    model = torch.nn.Linear(3, 2).to("quartz")
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(vector * 2, model.parameters())
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), vector * 2)
    fused = torch.nn.utils.fuse_linear_bn_eval(model.eval(), torch.nn.BatchNorm1d(2).to("quartz").eval())
    assert fused.weight.device.type == "quartz"


def test_data_loader_options():
    dataset = torch.utils.data.TensorDataset(torch.arange(10.0))
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, pin_memory=True)
    assert [batch.is_pinned() for (batch,) in loader] == [True, True]
    on_device = torch.utils.data.TensorDataset(torch.arange(10.0, device="quartz"))
    assert sum(batch.sum().item() for (batch,) in torch.utils.data.DataLoader(on_device, batch_size=3)) == 45
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.utils.data.DataLoader(on_device, shuffle=True, generator=generator)
    assert sum(batch.sum().item() for (batch,) in shuffled) == 45


def test_distributed_optimizers_and_fsdp_find_their_names():
    # What torch.distributed.fsdp and its checkpoints ask a device module for.
    for name in [
        "Stream",
        "Event",
        "stream",
        "current_stream",
        "current_device",
        "set_device",
        "device",
        "synchronize",
        "empty_cache",
    ]:
        assert hasattr(torch.quartz, name)
    assert "priority" in inspect.signature(torch.quartz.Stream.__new__).parameters
    assert torch._utils._get_device_module("quartz") is torch.quartz
    assert torch._utils._get_available_device_type() in ("quartz", "cuda")
    assert torch._utils._get_device_index("quartz:0", optional=True) == 0


def test_saving_is_possible_while_the_default_device_is_quartz(tmp_path):
    with torch.device("quartz"):
        model = torch.nn.Linear(2, 2)
        torch.save(model.state_dict(), tmp_path / "m.pt")
        model.load_state_dict(torch.load(tmp_path / "m.pt"))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.cuda
def test_cuda_array_interface():
    x = torch.arange(4.0, device="quartz")
    interface = x.__cuda_array_interface__
    assert interface["data"][0] == x.data_ptr() and interface["shape"] == (4,)


@pytest.mark.host
def test_host_tensors_have_no_cuda_array_interface():
    assert not hasattr(torch.arange(4.0, device="quartz"), "__cuda_array_interface__")
