"""Compile C++ sources of these tests with the compiler alone: neither ninja nor CMake is needed."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

FOLDER = Path(__file__).parent


def compile_library(source: Path, target: Path, *options: str) -> Path:
    """Compile one file into a shared library against the installed PyTorch and return its path."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert compiler, "these tests need a C++ compiler"
    includes = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    folder = cpp_extension.library_paths()[0]
    command = [compiler, "-shared", "-fPIC", "-std=c++20", "-O1", "-w", *includes, *options, str(source), "-o", str(target)]
    command += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="session")
def thirdparty(tmp_path_factory):
    """Build and load the extension that knows nothing of quartz; return its operators."""
    target = tmp_path_factory.mktemp("thirdparty") / f"thirdparty{sys.version_info.minor}.so"
    torch.ops.load_library(str(compile_library(FOLDER / "thirdparty.cpp", target)))
    return torch.ops.thirdparty
