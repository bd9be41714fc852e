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

    for steps, status in ("2", (0, 1)), ("0", (2,)), ("-3", (2,)), ("abc", (2,)), ("5x", (2,)), ("", (2,)):
        done = subprocess.run([program, steps], capture_output=True, text=True, timeout=100)
        assert done.returncode in status, (steps, done)
        assert ("step 2  loss" in done.stdout) == (steps == "2")
        assert ("usage: spirals [steps]" in done.stderr) == (steps != "2")


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


PROJECT = """
cmake_minimum_required(VERSION 3.22...3.31)
project(user LANGUAGES CXX)
{torch}
find_package(quartz REQUIRED)
get_target_property(libraries quartz::quartz INTERFACE_LINK_LIBRARIES)
message(STATUS "links: ${{libraries}}")
"""


def configure(folder, torch_package, prefixes):
    (folder / "CMakeLists.txt").write_text(PROJECT.format(torch=torch_package))
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    command = [cmake, "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={';'.join(map(str, prefixes))}"]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)


@pytest.mark.host
def test_after_find_package_of_torch(tmp_path):
    # A CUDA build of torch asks for the whole CUDA toolkit here, which is why the package does without.
    if torch.version.cuda is None:
        done = configure(tmp_path, "find_package(Torch REQUIRED)", [torch.utils.cmake_prefix_path, PACKAGE])
        assert done.returncode == 0, done.stderr
        assert "links: torch" in done.stdout


def test_another_torch_version_is_refused_at_configure_time(tmp_path):
    header = tmp_path / "torch" / "include" / "torch" / "headeronly" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 3\n")
    package = tmp_path / "torch_quartz"
    shutil.copytree(PACKAGE / "share", package / "share")
    done = configure(tmp_path, "", [package])
    assert done.returncode != 0
    text = " ".join(done.stderr.split())
    assert "libquartz.so was built against torch" in text and "but torch 2.3 was found" in text
    header.unlink()
    done = configure(tmp_path, "", [package])
    assert done.returncode != 0 and "torch was not found; add the output of" in " ".join(done.stderr.split())
