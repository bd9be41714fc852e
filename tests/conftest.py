"""Shared by all tests: the device is registered, and other processes can be asked to run a piece of code."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch_quartz

PYTHON_FOLDER = Path(torch_quartz.__file__).resolve().parents[1]


def pytest_configure(config):
    config.addinivalue_line("markers", "host: the test is about the host substrate and is not collected on cuda")
    config.addinivalue_line("markers", "cuda: the test is about the cuda substrate and is not collected on host")
    config.addinivalue_line("markers", "two_devices: the test needs two devices and is not collected with fewer")
    config.addinivalue_line("markers", "large_memory(gib): not collected where the device has less memory than that")
    torch.set_num_threads(1)


def _device_gib():
    if torch.quartz.substrate() == "cuda":
        return torch.cuda.get_device_properties(0).total_memory / 2**30
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def pytest_collection_modifyitems(config, items):
    # Deselected, not skipped: what does not concern this process is not counted at all.
    other = "cuda" if torch.quartz.substrate() == "host" else "host"
    unwanted = [
        item
        for item in items
        if item.get_closest_marker(other)
        or (item.get_closest_marker("two_devices") and torch.quartz.device_count() < 2)
        or ((large := item.get_closest_marker("large_memory")) and _device_gib() < large.args[0])
    ]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item not in unwanted]


def _messages(stderr):
    # Lines without the time and thread of PyTorch's log, "[W1130 16:52:09.109982845 CudaIPCTypes.cpp:16] ...".
    return [re.sub(r"^\[W\S+ \S+ ", "[", line) for line in stderr.splitlines()]


@pytest.fixture
def run_python(tmp_path):
    """Return a function that runs code in a fresh interpreter and returns what it printed.

    The process must end with `status` and, unless `stderr` is given, write nothing to stderr; `stderr` is text that
    must occur there. With `as_native` it may write, on cuda, what the same program writes that uses "cuda" itself.
    """

    def run(code, *, status=0, stderr=None, environment=None, arguments=(), autoload=False, as_native=False):
        variables = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_QUARTZ_AUTOLOAD")}
        variables["PYTHONPATH"] = os.pathsep.join([str(PYTHON_FOLDER), variables.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        )
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1" if autoload else "0"
        # Python 3.12 and later warn of every fork of a process with threads, which PyTorch always has.
        variables["PYTHONWARNINGS"] = "ignore:This process (pid=:DeprecationWarning"
        variables.update(environment or {})
        script = tmp_path / f"script_{len(list(tmp_path.glob('script_*')))}.py"
        script.write_text(textwrap.dedent(code))
        done = subprocess.run(
            [sys.executable, str(script), *map(str, arguments)],
            capture_output=True,
            text=True,
            env=variables,
            cwd=tmp_path,
            timeout=300,
        )
        assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        if as_native and torch.quartz.substrate() == "cuda":
            native = code.replace("import torch_quartz", "pass").replace("quartz", "cuda")
            script.write_text(textwrap.dedent(native))
            reference = subprocess.run(
                done.args, capture_output=True, text=True, env=variables, cwd=tmp_path, timeout=300
            )
            assert (reference.returncode, reference.stdout) == (status, done.stdout), reference.stderr
            assert _messages(done.stderr) == _messages(reference.stderr)
        elif stderr is None:
            assert done.stderr == ""
        else:
            assert stderr in done.stderr
        return done.stdout

    return run
