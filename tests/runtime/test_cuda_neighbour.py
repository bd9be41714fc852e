"""Plain "cuda" programs in a process that has imported torch_quartz, and beside an installed but not imported package.

The reference is the same program in a process without torch_quartz. On the host substrate the stand-in for CUDA is
``"mtia"``: fake tensors of that device run the same autograd engine to the same question, which accelerator there is.
"""

import json
import os
import shutil
import subprocess

import pytest
import torch
from torch.utils import cpp_extension

TRAINING = """
    import json, torch
    {imports}
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    layers = torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4)
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    side = torch.cuda.Stream()
    for step in range(8):
        x = torch.randn(32, 16).cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.mse_loss(model(x), x[:, :4])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        del loss  # a graph of the other stream that is still alive makes PyTorch warn
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # a node on another stream, and a loss that ends on the CPU
            model.zero_grad()
            (model(x).sum() * 2).cpu().backward()
        torch.cuda.current_stream().wait_stream(side)
        losses.append(model[0].weight.grad.double().sum().item())
    x = torch.randn(4, device="cuda", dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(torch.sin, x) and torch.autograd.gradgradcheck(torch.sin, x)
    y = torch.utils.checkpoint.checkpoint(lambda x: x.sin().exp(), x, use_reentrant=True)
    y.sum().backward()
    losses.append(x.grad.sum().item())
    print(json.dumps(losses))
"""


@pytest.mark.cuda
def test_a_training_loop_equals_one_without_the_package(run_python):
    expected = json.loads(run_python(TRAINING.format(imports="")))
    imported = json.loads(run_python(TRAINING.format(imports="import torch_quartz")))
    assert imported == expected


@pytest.mark.cuda
def test_installed_but_not_imported_changes_nothing(run_python):
    # With autoload on, as in a user's process: on a CUDA build the entry point leaves PyTorch alone.
    code = """
        import sys, torch
        assert torch.accelerator.current_accelerator().type == "cuda"
        assert "torch_quartz" not in sys.modules
    """
    run_python(code, autoload=True)
    expected = json.loads(run_python(TRAINING.format(imports="")))
    assert json.loads(run_python(TRAINING.format(imports=""), autoload=True)) == expected


@pytest.mark.cuda
def test_forward_on_cuda_tensors():
    x = torch.randn(64, 64)
    y = torch.nn.functional.softmax(x.cuda() @ x.cuda(), -1)
    assert y.device.type == "cuda" and torch.allclose(y.cpu(), torch.softmax(x @ x, -1), atol=1e-3)
    assert torch.cuda.memory_allocated() > 0


@pytest.mark.cuda
def test_threads_run_backward_on_both_devices_at_a_time(run_python):
    run_python(
        """
        import threading, torch, torch_quartz
        errors = []

        def work(device):
            try:
                for step in range(200):
                    x = torch.full((64,), float(step), device=device, requires_grad=True)
                    (x * x).sum().backward()
                    assert torch.equal(x.grad, 2 * x.detach())
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(device,)) for device in ("cuda", "quartz") * 3]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not errors, errors
        """
    )


@pytest.mark.cuda
def test_a_cuda_backward_inside_a_quartz_backward_and_the_reverse():
    seen = []

    def inner(device):
        with torch.enable_grad():  # hooks run without
            z = torch.ones(3, device=device, requires_grad=True)
            (z * 3).sum().backward()
        seen.append(z.grad.tolist())

    for outer, other in (("quartz", "cuda"), ("cuda", "quartz"), ("cuda", "cuda")):
        x = torch.ones(2, device=outer, requires_grad=True)
        x.register_hook(lambda grad, other=other: inner(other))
        (x * 2).sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]
    assert seen == [[3.0] * 3] * 3


@pytest.mark.cuda
def test_a_graph_across_both_devices_is_refused_with_one_sentence():
    x = torch.ones(3, device="cuda", requires_grad=True)
    for crossing in (x.to("quartz") * 2, (x.to("quartz") * 2).to("cuda")):
        with pytest.raises(RuntimeError, match='crosses between "cuda" and "quartz"'):
            crossing.sum().backward()
    q = torch.ones(3, device="quartz", requires_grad=True)
    (q * 2).sum().backward()
    assert q.grad.tolist() == [2.0] * 3


@pytest.mark.cuda
def test_undo(run_python):
    run_python(
        """
        import torch, torch_quartz
        from torch_quartz.integrations import cuda_backward
        x = torch.ones(3, device="cuda", requires_grad=True)
        (x * 2).sum().backward()
        cuda_backward.undo()
        try:
            (x * 2).sum().backward()
        except RuntimeError as error:
            assert "INTERNAL ASSERT" in str(error)
        else:
            raise AssertionError("without the patch PyTorch refuses")
        cuda_backward.install()
        (x * 2).sum().backward()
        assert x.grad.tolist() == [4.0] * 3
        """
    )


# ------------------------------------------------------------------ without a GPU: "mtia" in the part of CUDA

FAKE_DEVICE = """
#include <c10/core/impl/FakeGuardImpl.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(MTIA, FakeGuardImpl<DeviceType::MTIA>) }
"""

NEIGHBOUR = """
    import ctypes, sys, threading, torch, torch_quartz
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch_quartz import _C
    from torch_quartz.integrations import cuda_backward

    ctypes.CDLL(sys.argv[1])

    def backward(tail=lambda y: y):
        with FakeTensorMode():
            x = torch.randn(4, 4, device="mtia:0", requires_grad=True)
            w = x * 2
            tail((w + w * 3).sum()).backward()
            return x.grad.device.type

    def refused(function, text):
        try:
            function()
        except RuntimeError as error:
            assert text in str(error), error
        else:
            raise AssertionError("not refused")
"""


@pytest.fixture(scope="module")
def fake_mtia(tmp_path_factory):
    """A library that makes PyTorch believe in eight mtia devices, with c10's own guard for tests."""
    folder = tmp_path_factory.mktemp("fake_mtia")
    (folder / "fake_mtia.cpp").write_text(FAKE_DEVICE)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    command = [compiler, "-shared", "-fPIC", "-std=c++20", "-w", "fake_mtia.cpp", "-o", "fake_mtia.so"]
    command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{cpp_extension.library_paths()[0]}", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "fake_mtia.so"


@pytest.mark.host
def test_the_engine_is_told_the_graphs_accelerator(run_python, fake_mtia):
    code = (
        NEIGHBOUR
        + """
    refused(backward, "INTERNAL ASSERT")  # what PyTorch does by itself
    cuda_backward.install_for("mtia")
    assert backward() == "mtia"
    assert backward(lambda y: y.cpu() * 2) == "mtia"  # the graph counts, not the loss
    assert backward(lambda y: torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=True)) == "mtia"
    assert _C.accelerator_is_redirected() and _C.scoped_accelerator() is None
    q = torch.ones(3, device="quartz", requires_grad=True)
    (q * q).sum().backward()
    assert q.grad.tolist() == [2.0] * 3
    with FakeTensorMode():
        x = torch.randn(3, device="mtia", requires_grad=True)
        edge = torch.autograd.graph.get_gradient_edge((x * 2).cpu() * 3)
        (grad,) = torch.autograd.grad([edge], [x], [torch.ones(3)])
        assert grad.device.type == "mtia"
    cuda_backward.undo()
    refused(backward, "INTERNAL ASSERT")
    cuda_backward.install_for("mtia")
    assert backward() == "mtia"
    """
    )
    run_python(code, arguments=[fake_mtia])


@pytest.mark.host
def test_threads_and_nested_graphs_keep_their_accelerator(run_python, fake_mtia):
    code = (
        NEIGHBOUR
        + """
    cuda_backward.install_for("mtia")
    errors = []

    def quartz_backward():
        q = torch.ones(3, device="quartz", requires_grad=True)
        (q * q).sum().backward()
        assert q.grad.tolist() == [2.0] * 3

    def work(function):
        try:
            for _ in range(60):
                function()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(function,)) for function in (backward, quartz_backward) * 2]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not errors, errors

    def inside(device, outer):
        def hook(grad):
            assert _C.scoped_accelerator() == outer
            with torch.enable_grad():
                z = torch.ones(3, device=device, requires_grad=True)
                (z * 3).sum().backward()
            seen.append((outer, z.grad.device.type))
        return hook

    seen = []
    with FakeTensorMode():
        for outer, inner in (("quartz", "mtia"), ("mtia", "quartz"), ("mtia", "mtia")):
            x = torch.ones(2, device=outer, requires_grad=True)
            x.register_hook(inside(inner, None if outer == "quartz" else outer))
            (x * 2).sum().backward()
            assert x.grad.device.type == outer
    assert seen == [(None, "mtia"), ("mtia", "quartz"), ("mtia", "mtia")]
    """
    )
    run_python(code, arguments=[fake_mtia])


@pytest.mark.host
def test_a_mixed_graph_and_a_missing_slot_are_explained(run_python, fake_mtia):
    code = (
        NEIGHBOUR
        + """
    cuda_backward.install_for("mtia")

    def mixed():
        with FakeTensorMode():
            x = torch.randn(3, device="mtia", requires_grad=True)
            ((x * 2).to("quartz") * 3).sum().backward()

    refused(mixed, 'crosses between "mtia" and "quartz"')
    assert backward() == "mtia"

    class Without:
        def __getattr__(self, name):
            return getattr(_C, name)
        def call_with_accelerator(self, *args):
            raise RuntimeError("quartz: the accelerator question cannot be redirected in libtorch_cpu.so: a test")

    cuda_backward.undo()
    import torch_quartz
    torch_quartz._C = Without()
    cuda_backward.install_for("mtia")
    refused(backward, "run it in a process without torch_quartz")
    """
    )
    run_python(code, arguments=[fake_mtia])
