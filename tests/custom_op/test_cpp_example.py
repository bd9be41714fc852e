"""examples/05_cpp and the CMake build of examples/02_custom_op: configured, built and run as a user would."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_quartz

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PACKAGE = Path(torch_quartz.__file__).resolve().parent


def run(*command, **environment):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env={**os.environ, **environment}, timeout=500
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Return a function that configures and builds a folder of examples and returns the build folder."""
    # The virtual environment's own cmake and ninja first: it need not be activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    assert cmake, "these tests need cmake: pip install cmake"

    def configure_and_build(name):
        folder = tmp_path_factory.mktemp(name)
        prefix = f"{torch.utils.cmake_prefix_path};{PACKAGE}"
        options = [f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release"]
        run(cmake, "-S", EXAMPLES / name, "-B", folder, *options, PATH=path)
        run(cmake, "--build", folder, PATH=path)
        return folder

    return configure_and_build


def test_a_program_without_python(build):
    program = build("05_cpp") / "spirals"
    output = run(program)
    assert re.search(r"points told apart: (9[5-9]|100)\S* % on quartz:0", output), output
    assert f"quartz on {torch.quartz.substrate()} memory" in output
    libraries = run("ldd", program)
    assert "libquartz.so" in libraries and "libpython" not in libraries and "not found" not in libraries


def test_an_operator_built_with_cmake(build, run_python):
    library = build("02_custom_op") / "librms_scale.so"
    run_python(
        """
        import sys, torch, torch_quartz
        torch.ops.load_library(sys.argv[1])
        x = torch.randn(3, 8, device="quartz")
        y = torch.ops.example_cpp.rms_scale(x, torch.ones(8, device="quartz"), 1e-6)
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
        """,
        arguments=[library],
    )
