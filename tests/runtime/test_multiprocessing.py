"""Other processes: queues, spawned and forked children, DataLoader workers, shared memory."""

import multiprocessing.reduction as reduction
import pickle

import pytest
import torch
import torch.multiprocessing as mp
import torch_quartz


def through_a_pipe(value):
    """Reduce and rebuild as a queue does, in this process."""
    return pickle.loads(reduction.ForkingPickler.dumps(value))


@pytest.mark.host
@pytest.mark.parametrize("strategy", sorted(mp.get_all_sharing_strategies()))
def test_values_are_copied_on_host(strategy):
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy(strategy)
    try:
        x = torch.arange(6.0, device="quartz").reshape(2, 3)
        pointer = x.data_ptr()
        y = through_a_pipe(x)
        assert y.device == x.device and torch.equal(x, y) and y.data_ptr() != pointer
        assert x.data_ptr() == pointer and (x + 1).sum().item() == 21  # sending leaves the sender's memory alone
        y.zero_()
        assert x.sum().item() == 15
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
    assert through_a_pipe(x.detach()).tolist() == [2, 2]


def test_share_memory_does_nothing_as_on_cuda():
    x = torch.ones(3, device="quartz")
    pointer = x.data_ptr()
    assert x.share_memory_() is x and x.data_ptr() == pointer
    model = torch.nn.Linear(2, 2).to("quartz").share_memory()
    assert model(torch.ones(1, 2, device="quartz")).shape == (1, 2)
    assert (x + 1).tolist() == [2, 2, 2]


SPAWN = """
import sys, torch, torch.multiprocessing as mp

def child(queue, answers):
    x = queue.get()
    answers.put((x * 2, str(x.device), float(x.sum())))
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
    assert run_python(SPAWN, arguments=[method]) == "ok\n"


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
    assert run_python(code) == "ok\n"


@pytest.mark.cuda
def test_memory_is_shared_on_cuda(run_python):
    code = """
    import torch, torch.multiprocessing as mp

    def child(x, done):
        x.fill_(7)
        torch.quartz.synchronize()
        done.set()

    if __name__ == "__main__":
        import torch_quartz
        context = mp.get_context("spawn")
        x, done = torch.ones(3, device="quartz"), context.Event()
        process = context.Process(target=child, args=(x, done))
        process.start()
        assert done.wait(120)
        process.join(60)
        assert x.tolist() == [7, 7, 7] and process.exitcode == 0
        print("ok")
    """
    assert run_python(code) == "ok\n"


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
    assert through_a_pipe(torch.ones(2, device="quartz")).device.type == "quartz"
