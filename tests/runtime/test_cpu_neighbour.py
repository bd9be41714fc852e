"""Programs on the CPU in a process that has the device, by ``import torch_quartz`` or by ``import torch`` alone."""

import pytest
import torch
from torch import nn


def train(model):
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def linear():
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def test_nothing_is_counted_or_allocated():
    torch.quartz.reset_op_counts()
    before = torch.quartz.memory_stats().get("allocation.all.allocated", 0)
    train(linear())
    assert torch.quartz.op_counts() == {}
    assert torch.quartz.memory_stats().get("allocation.all.allocated", 0) == before


@pytest.mark.host
def test_data_parallel_stays_on_the_cpu():
    model = linear()
    parallel = nn.DataParallel(model)
    assert parallel.module.weight.device.type == "cpu" and parallel(torch.ones(2, 3)).device.type == "cpu"
    assert all(torch.equal(a, b) for a, b in zip(train(parallel), train(linear()), strict=True))
    on_quartz = nn.DataParallel(linear().to("quartz"))
    assert on_quartz(torch.ones(2, 3, device="quartz")).device.type == "quartz"


def test_checkpoint_fork_rng_and_autocast():
    model = linear()
    x = torch.ones(2, 3, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        torch.rand(3)
    assert torch.equal(state, torch.get_rng_state())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16


def test_data_loader():
    dataset = torch.utils.data.TensorDataset(torch.arange(6.0))
    for pin in (False, True):
        batches = [batch for (batch,) in torch.utils.data.DataLoader(dataset, batch_size=2, pin_memory=pin)]
        assert torch.cat(batches).tolist() == [0, 1, 2, 3, 4, 5] and batches[0].device.type == "cpu"


def test_same_numbers_as_without_the_package(run_python, tmp_path):
    code = """
    import sys, torch
    if sys.argv[1] == "with": import torch_quartz
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.LSTM(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 8))[0].sum().backward()
        optimizer.step()
    torch.save([p.detach() for p in model.parameters()], sys.argv[2])
    """
    for which in ("with", "without"):
        run_python(code, arguments=[which, tmp_path / which])
    a, b = (torch.load(tmp_path / which) for which in ("with", "without"))
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch was built without gloo")
def test_distributed_training_on_the_cpu(run_python, tmp_path):
    code = """
    import sys, torch, torch_quartz
    import torch.distributed as dist
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.ones(2, 3)).sum().backward()
    assert model.module.weight.grad.device.type == "cpu"
    objects = [None]
    dist.all_gather_object(objects, {"a": 1})
    dist.barrier()
    x = torch.ones(2)
    dist.all_reduce(x)
    assert objects == [{"a": 1}] and x.tolist() == [1, 1]
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
    """
    run_python(code, arguments=[tmp_path / "store"], stderr="")


def test_compiled_cpu_code_is_untouched():
    model = linear()
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(compiled(torch.ones(2, 3)), model(torch.ones(2, 3)))
