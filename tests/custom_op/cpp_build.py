"""Compile C++ sources of these tests with the compiler alone: neither ninja nor CMake is needed."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

from torch.utils import cpp_extension


def compile_library(source: Path, target: Path, *options: str) -> Path:
    """Compile one file into a shared library against the installed PyTorch and return its path."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    assert compiler, "these tests need a C++ compiler"
    includes = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    folder = cpp_extension.library_paths()[0]
    command = [compiler, "-shared", "-fPIC", "-std=c++20", "-O0", "-w", *includes, str(source), *options]
    command += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lc10", "-ltorch_cpu", "-ltorch", "-o", str(target)]
    command += ["-l:libstdc++.so.6"]  # libtorch's own, also for a compiler set up to link a static one: two crash
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target
