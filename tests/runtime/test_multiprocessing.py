"""Other processes: queues, spawned and forked children, DataLoader workers, shared memory."""

import multiprocessing.reduction as reduction
import pickle

import pytest
import torch
import torch.multiprocessing as mp
import torch_quartz


def through_a_pipe(value):
    """Reduce and rebuild as a queue does, in this process (CUDA cannot open its own memory: host only)."""
    return pickle.loads(reduction.ForkingPickler.dumps(value))


@pytest.mark.host
@pytest.mark.parametrize("strategy", sorted(mp.get_all_sharing_strategies()))
def test_host_memory_is_shared(strategy):
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy(strategy)
    try:
        x = torch.arange(6.0, device="quartz").reshape(2, 3)
        view, allocated = x[1], torch.quartz.memory_allocated()
        y, z = through_a_pipe((x, view))
        assert y.device == z.device == x.device and torch.equal(x, y) and torch.equal(view, z)
        y.add_(1)
        assert x.sum().item() == 21 and view.tolist() == [4, 5, 6] == z.tolist()
        assert (x + view).sum().item() == 51  # operators see the new memory
        x.zero_()
        assert y.eq(0).all()
        del y, z
        assert torch.quartz.memory_allocated() == allocated
    finally:
        mp.set_sharing_strategy(before)


@pytest.mark.host
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 4, device="quartz").t()[1:],
        lambda: torch.randn(3, device="quartz").expand(2, 3),
        lambda: torch.empty(0, 2, device="quartz"),
        lambda: torch.tensor(3.0, device="quartz"),
        lambda: torch.randn(3, dtype=torch.complex64, device="quartz").conj(),
        lambda: torch.randn(3, dtype=torch.complex64, device="quartz").conj().imag,
        lambda: torch.tensor([True, False], device="quartz"),
        lambda: torch.ones(3, dtype=torch.bfloat16, device="quartz"),
        lambda: torch.eye(3, device="quartz").to_sparse(),
        lambda: torch.eye(3, device="quartz").to_sparse_csr(),
        lambda: torch.nn.Parameter(torch.ones(2, device="quartz")),
        lambda: torch.nn.Parameter(torch.ones(2, device="quartz").int(), requires_grad=False),
        lambda: torch.ones(2, device="quartz", requires_grad=True),
    ],
)
def test_kinds_of_tensors(make):
    x = make()
    y = through_a_pipe(x)
    assert type(y) is type(x) and y.device == x.device and y.dtype == x.dtype and y.shape == x.shape
    assert y.requires_grad == x.requires_grad and y.layout == x.layout
    dense = [t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in (x, y)]
    assert torch.equal(dense[0].cpu(), dense[1].cpu())


@pytest.mark.host
def test_subclasses_and_storages():
    x = torch.ones(3, device="quartz")
    storage = through_a_pipe(x.untyped_storage())
    assert storage.device == x.device and list(storage.cpu()) == list(x.untyped_storage().cpu())
    storage.fill_(0)
    assert x.tolist() == [0, 0, 0]
    y = through_a_pipe(Tagged(x))
    assert type(y) is Tagged and y.device == x.device and torch.equal(y, x)


def test_cpu_tensors_are_shared_as_before():
    x = torch.zeros(3)
    y = through_a_pipe(x)
    y.fill_(2)
    assert x.tolist() == [2, 2, 2] and x.is_shared()


def test_a_tensor_inside_a_graph_is_refused():
    x = torch.ones(2, device="quartz", requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"send tensor.detach\(\)"):
        reduction.ForkingPickler.dumps(x)
    reduction.ForkingPickler.dumps(x.detach())


def test_share_memory():
    x = torch.arange(3.0, device="quartz")
    view = x[1:]
    assert x.share_memory_() is x and x.is_shared() and view.is_shared()
    view.add_(1)
    assert x.tolist() == [0, 2, 3] and (x + 1).tolist() == [1, 3, 4]
    pointer = x.data_ptr()
    assert x.share_memory_().data_ptr() == pointer
    model = torch.nn.Linear(2, 2).to("quartz").share_memory()
    assert all(p.is_shared() for p in model.parameters())
    model(torch.ones(1, 2, device="quartz")).sum().backward()
    assert torch.empty(0, device="quartz").share_memory_().numel() == 0


@pytest.mark.host
def test_memory_of_another_library_is_not_shared():
    foreign = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(torch.ones(3, device="quartz")))
    with pytest.raises(RuntimeError, match=r"belongs to another library .* share tensor.clone\(\) instead"):
        foreign.share_memory_()
    assert foreign.sum().item() == 3 and foreign.clone().share_memory_().is_shared()


SPAWN = """
import sys, torch, torch.multiprocessing as mp

def child(queue, answers):
    x = queue.get()
    answers.put((x * 2, str(x.device), float(x.sum())))
    del x  # gives the parent its memory back
    queue.get()  # stay alive until the parent has the answer

if __name__ == "__main__":
    import torch_quartz
    context = mp.get_context(sys.argv[1])
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(queue, answers))
    process.start()
    x = torch.arange(4.0, device="quartz")
    queue.put(x)
    y, device, total = answers.get(timeout=120)
    assert y.device == x.device and device == "quartz:0" and total == 6.0, (y, device, total)
    assert torch.equal(y.cpu(), torch.arange(4.0) * 2)
    del y
    queue.put(None)
    process.join(60)
    assert process.exitcode == 0, process.exitcode
    print("ok")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_queues_between_processes(run_python, method):
    # The child of spawn imports torch_quartz when it unpickles its first quartz tensor.
    # as_native: the warning of CUDA IPC about memory that a child gave back only when it ended.
    assert run_python(SPAWN, arguments=[method], as_native=True) == "ok\n"


@pytest.mark.host
def test_queues_between_forked_processes(run_python):
    assert run_python(SPAWN, arguments=["fork"]) == "ok\n"


def test_spawned_function_arguments(run_python):
    code = """
    import torch, torch.multiprocessing as mp

    def child(rank, x):
        assert x.device.type == "quartz" and x.sum().item() == 3, x
        (x * torch.ones(3, device="quartz", requires_grad=True)).sum().backward()

    if __name__ == "__main__":
        import torch_quartz
        mp.spawn(child, args=(torch.ones(3, device="quartz"),), nprocs=2)
        print("ok")
    """
    assert run_python(code, as_native=True) == "ok\n"


def test_children_see_the_memory_of_their_parent(run_python):
    code = """
    import torch, torch.multiprocessing as mp

    def child(model, done, go):
        with torch.no_grad():
            model.weight.fill_(7)
        torch.quartz.synchronize()
        done.set()
        go.wait(120)
        assert model.bias.tolist() == [5, 5], model.bias

    if __name__ == "__main__":
        import torch_quartz
        context = mp.get_context("spawn")
        model = torch.nn.Linear(2, 2).to("quartz").share_memory()
        done, go = context.Event(), context.Event()
        process = context.Process(target=child, args=(model, done, go))
        process.start()
        assert done.wait(120)
        assert model.weight.eq(7).all()
        with torch.no_grad():
            model.bias.fill_(5)
        torch.quartz.synchronize()
        go.set()
        process.join(60)
        assert process.exitcode == 0
        print("ok")
    """
    assert run_python(code, as_native=True) == "ok\n"


@pytest.mark.host
def test_training_in_several_processes_on_shared_weights(run_python):
    code = """
    import torch, torch.multiprocessing as mp

    def child(rank, model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 2, device="quartz")).sum().backward()
            optimizer.step()

    if __name__ == "__main__":
        import torch_quartz
        model = torch.nn.Linear(2, 1, bias=False).to("quartz").share_memory()
        before = model.weight.sum().item()
        mp.spawn(child, args=(model,), nprocs=2)
        # Each child subtracts 1 in all; updates may be lost where both write at once, never all of one child's.
        change = before - model.weight.sum().item()
        assert 0.99 < change < 2.01, change
        print("ok")
    """
    assert run_python(code) == "ok\n"


@pytest.mark.host
def test_shared_memory_survives_a_fork(run_python):
    code = """
    import os, torch, torch_quartz
    shared, private = torch.zeros(3, device="quartz").share_memory_(), torch.zeros(3, device="quartz")
    child = os.fork()
    if child == 0:
        shared.fill_(1)
        private.fill_(1)
        os._exit(0)
    os.waitpid(child, 0)
    assert shared.tolist() == [1, 1, 1] and private.tolist() == [0, 0, 0]
    """
    run_python(code)


class Tagged(torch.Tensor):
    """A subclass, which pickles itself and its storage without a reducer of its own."""


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index * index], dtype=torch.float32)


class QuartzSquares(Squares):
    def __getitem__(self, index):
        return super().__getitem__(index).to("quartz")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_data_loader_with_cpu_samples(workers, persistent):
    if persistent and not workers:
        persistent = False
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=4, num_workers=workers, pin_memory=True, persistent_workers=persistent
    )
    for _ in range(2):
        batches = list(loader)
        assert all(batch.is_pinned() for batch in batches)
        moved = torch.cat([batch.to("quartz", non_blocking=True) for batch in batches])
        assert moved.flatten().tolist() == [i * i for i in range(10)]


@pytest.mark.host
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_whose_workers_make_quartz_samples(context):
    loader = torch.utils.data.DataLoader(
        QuartzSquares(), batch_size=4, num_workers=2, multiprocessing_context=context, timeout=120
    )
    batches = list(loader)
    assert all(batch.device == torch.device("quartz:0") for batch in batches)
    assert torch.cat(batches).flatten().tolist() == [i * i for i in range(10)]


def test_undoing_the_patch():
    original = torch.multiprocessing.reductions.reduce_tensor
    torch_quartz.undo_patches()
    try:
        assert reduction.ForkingPickler._extra_reducers[torch.Tensor] is original
    finally:
        torch_quartz.install_patches()
    assert reduction.ForkingPickler._extra_reducers[torch.Tensor] is not original
