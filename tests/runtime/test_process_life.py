"""Forks, threads, and ending: exit status 0 and nothing on stderr, whatever is alive."""

import pytest
import torch

ALIVE_AT_EXIT = {
    "nothing": "",
    "tensor": "x = torch.ones(3, device='quartz')",
    "module attribute": "torch.kept = torch.ones(3, device='quartz')",
    "graph": "x = torch.ones(3, device='quartz', requires_grad=True); y = (x * 2).sum()",
    "after backward": "x = torch.ones(3, device='quartz', requires_grad=True); (x * 2).sum().backward()",
    "retained graph": "x = torch.ones(3, device='quartz', requires_grad=True); y = (x * 2).sum();"
    "y.backward(retain_graph=True)",
    "generator": "g = torch.Generator('quartz'); torch.rand(2, device='quartz', generator=g)",
    "streams": "s = torch.quartz.Stream(); e = s.record_event(); torch.quartz.set_stream(s)",
    "pinned": "p = torch.ones(3).pin_memory(); q = p.to('quartz', non_blocking=True)",
    "native alias": "x = torch.ones(3, device='quartz'); a = torch.quartz.native_alias(x); del x",
    "cycle": "x = torch.ones(3, device='quartz'); x.self = x",
    "hooks": "x = torch.ones(3, device='quartz', requires_grad=True); x.register_hook(print); y = x * 2",
    "optimizer": "m = torch.nn.Linear(2, 2).to('quartz'); o = torch.optim.Adam(m.parameters());"
    "m(torch.ones(1, 2, device='quartz')).sum().backward(); o.step()",
    "numpy": "import numpy as np; x = torch.ones(3, device='quartz'); n = torch.from_dlpack(x); del x",
    "out of memory": "\ntry:\n    torch.empty(1 << 47, device='quartz')\nexcept torch.OutOfMemoryError:\n    pass",
}


@pytest.mark.parametrize("name", ALIVE_AT_EXIT)
def test_clean_exit(run_python, name):
    run_python(f"import torch, torch_quartz\n{ALIVE_AT_EXIT[name]}")


@pytest.mark.parametrize("status", [0, 3])
def test_exit_status_is_kept(run_python, status):
    run_python(
        f"""
        import sys, torch, torch_quartz
        x = torch.ones(3, device='quartz', requires_grad=True)
        (x * 2).sum().backward()
        sys.exit({status})
        """,
        status=status,
    )


def test_exit_right_after_backward_many_times(run_python):
    # PyTorch's engine releases the last graph on its own thread; without the barrier about one exit in three aborts.
    code = """
    import subprocess, sys
    child = (
        "import torch, torch_quartz\\n"
        "layers = [torch.nn.Linear(8, 8).to('quartz') for _ in range(20)]\\n"
        "x = torch.ones(4, 8, device='quartz')\\n"
        "for layer in layers: x = layer(x)\\n"
        "x.sum().backward()\\n"
    )
    for _ in range(8):
        done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", (done.returncode, done.stderr)
    """
    run_python(code)


def test_threads_still_training_at_exit(run_python):
    run_python(
        """
        import threading, torch, torch_quartz
        def work():
            for _ in range(20):
                x = torch.ones(8, 8, device='quartz', requires_grad=True)
                (x @ x).sum().backward()
        for _ in range(4):
            threading.Thread(target=work).start()
        """
    )


@pytest.mark.host
class TestForkOnHost:
    def test_child_goes_on(self, run_python):
        code = """
        import os, torch, torch_quartz
        x = torch.arange(4.0, device='quartz')
        x.sum()
        child = os.fork()
        if child == 0:
            y = x * 2
            assert y.sum().item() == 12 and torch.rand(2, device='quartz').shape == (2,)
            x.zero_()
            print("child", flush=True)
            raise SystemExit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert x.sum().item() == 6
        print("parent")
        """
        assert run_python(code) == "child\nparent\n"

    def test_child_trains_when_the_parent_has_not(self, run_python):
        code = """
        import os, torch, torch_quartz
        x = torch.ones(4, device='quartz', requires_grad=True)
        for _ in range(10):
            child = os.fork()
            if child == 0:
                (x * 3).sum().backward()
                assert x.grad.tolist() == [3, 3, 3, 3]
                raise SystemExit(0)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
        """
        run_python(code)

    def test_child_of_a_parent_that_has_trained(self, run_python):
        # PyTorch's rule for every device with autograd threads: no backward in the child, and it says so.
        code = """
        import os, torch, torch_quartz
        x = torch.ones(4, device='quartz', requires_grad=True)
        (x * 3).sum().backward()
        child = os.fork()
        if child == 0:
            assert (x.detach() + 1).sum().item() == 8
            try:
                (x * 3).sum().backward()
            except RuntimeError as error:
                assert "fork" in str(error), error
            else:
                raise SystemExit("no error")
            raise SystemExit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        """
        run_python(code)

    def test_memory_of_parent_and_child_is_separate(self, run_python):
        code = """
        import os, torch, torch_quartz
        x = torch.ones(1000, device='quartz')
        child = os.fork()
        if child == 0:
            before = torch.quartz.memory_allocated()
            y = torch.ones(1000, device='quartz')
            assert torch.quartz.memory_allocated() == before + 4000
            del x, y
            raise SystemExit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.quartz.memory_allocated() == 4000
        """
        run_python(code)


@pytest.mark.cuda
def test_fork_after_initialisation_on_cuda(run_python):
    code = """
    import os, torch, torch_quartz
    torch.ones(2, device='quartz')
    child = os.fork()
    if child == 0:
        for call in (lambda: torch.ones(2, device='quartz'), lambda: torch.ones(2).to('quartz'), torch.quartz.init):
            try:
                call()
            except RuntimeError as error:
                assert "forked subprocess" in str(error) and "spawn" in str(error), error
            else:
                os._exit(3)
        torch.manual_seed(0)  # must not touch the device
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    run_python(code)


def test_threads():
    import threading

    results, errors = {}, []
    weight = torch.randn(16, 16, device="quartz")
    expected = weight.cpu()

    def work(index):
        try:
            for step in range(20):
                x = torch.full((16, 16), float(index + 1), device="quartz", requires_grad=True)
                y = ((x @ weight) * step).sum()
                y.backward()
                assert torch.allclose(x.grad.cpu(), (expected.sum(1) * step).expand(16, 16), atol=1e-4)
                with torch.no_grad():
                    weight + x
            results[index] = x.grad.sum().item()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 8


def test_threads_have_their_own_modes():
    import threading

    seen = []

    def other():
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("quartz"), torch.quartz.current_stream()))

    with torch.no_grad(), torch.autocast("quartz"), torch.quartz.stream(torch.quartz.Stream()):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [(True, False, torch.quartz.default_stream())]
