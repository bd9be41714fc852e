"""The arrows between the folders, read off the sources: no compiler, no torch, no import of the package.

kernels <- runtime <- aten; engine is standard C++; pybind11 is seen by torch_ext alone; one place reads each
environment variable; the project's operators are called through python/torch_quartz/ops.
"""

import functools
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
CPP = (".h", ".cpp", ".cu", ".cuh")
SOURCE = (*CPP, ".py", ".pyi", ".sh", ".cmake", ".txt", ".toml", ".yaml", ".in")
MAX_LINES = 800

TORCH = r"(torch|ATen|c10|caffe2)/"
PYTHON = r"(pybind11/|Python\.h|torch/(extension|python)\.h|torch/csrc/([A-Z]\w*\.h|.*(pybind|python)|.*object_ptr))"

# folder under csrc or elsewhere: the includes that no file in it may have
FORBIDDEN = {
    "csrc/kernels": rf"{TORCH}|(\.\./)*(runtime|aten|engine)/",
    "csrc/runtime": r"(\.\./)*(aten|engine)/",
    "csrc/engine": rf"{TORCH}|(\.\./)*(runtime|aten)/",
    "csrc/aten": r"(\.\./)*engine/",
    "csrc": PYTHON,
    "examples": r"(\.\./)+csrc/",
}


def files(folder: str, endings: tuple[str, ...]) -> list[pathlib.Path]:
    """Return the tracked or new files under `folder` (built and ignored ones are not the project's)."""
    return [path for path in _project() if path.is_relative_to(ROOT / folder) and path.suffix in endings]


@functools.cache
def _project() -> tuple[pathlib.Path, ...]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.splitlines()
        paths = {ROOT / name for name in listed}
    except (OSError, subprocess.CalledProcessError):  # an unpacked copy without git
        folders = ("csrc", "torch_ext", "python", "tests", "examples", "cmake", "docs", "scripts")
        paths = {path for folder in folders for path in (ROOT / folder).rglob("*")}
        paths -= {path for path in paths if {"build", "include", "share"} & set(path.parts[len(ROOT.parts) :])}
        paths |= set(ROOT.glob("*.*"))
    return tuple(path for path in sorted(paths) if path.is_file())


def name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines_matching(paths: list[pathlib.Path], pattern: str) -> list[str]:
    found = re.compile(pattern)
    return [
        f"{name(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if found.search(line)
    ]


def test_sources_are_found():
    assert files("csrc", CPP), "no C++ source found: the tests below would check nothing"
    assert files("python", (".py",)), "no Python source found: the tests below would check nothing"


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_includes(folder):
    wrong = lines_matching(files(folder, CPP), rf'^\s*#\s*include\s*[<"]({FORBIDDEN[folder]})')
    assert not wrong, f"{folder} may not include {FORBIDDEN[folder]}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("#include <ATen/ATen.h>", "csrc/kernels"),
        ('#include "runtime/device.h"', "csrc/kernels"),
        ('#include "aten/fallback.h"', "csrc/runtime"),
        ("#include <c10/core/Device.h>", "csrc/engine"),
        ("#include <pybind11/pybind11.h>", "csrc"),
        ("#include <torch/csrc/utils/pybind.h>", "csrc"),
        ("# include <Python.h>", "csrc"),
    ],
)
def test_include_rules_catch(line, folder):
    assert re.search(rf'^\s*#\s*include\s*[<"]({FORBIDDEN[folder]})', line)


def test_pybind11_only_in_torch_ext():
    elsewhere = [path for path in files(".", CPP) if not name(path).startswith(("torch_ext/", "examples/", "tests/"))]
    assert not lines_matching(elsewhere, r"PYBIND11_|py::|pybind11::|\bPyObject\b")


def test_torch_ops_only_in_ops():
    others = [path for path in files("python", (".py",)) if not name(path).startswith("python/torch_quartz/ops/")]
    assert not lines_matching(others, r"torch\.ops\.quartz\b")  # the operators of PyTorch and of others are free


def test_environment_is_read_in_one_place_a_language():
    python = [path for path in files("python", (".py",)) if path.name != "environment.py"]
    assert not lines_matching(python, r"(environ|getenv).*TORCH_QUARTZ_")
    cpp = files("csrc", CPP) + files("torch_ext", CPP)
    readers = [path for path in cpp if name(path) != "csrc/runtime/environment.cpp" and "/tests/" not in name(path)]
    assert not lines_matching(readers, r"\bgetenv\s*\(")


def test_environment_variables_are_documented():
    page = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    used: dict[str, str] = {}
    for path in files(".", SOURCE):
        for variable in re.findall(r"\bTORCH_QUARTZ_[A-Z0-9_]*[A-Z0-9]\b", path.read_text(encoding="utf-8")):
            used.setdefault(variable, name(path))
    missing = {variable: where for variable, where in used.items() if not re.search(rf"\b{variable}\b", page)}
    assert not missing, f"docs/environment.md does not name {missing}"


def test_file_length():
    long = {
        name(path): count
        for path in files(".", SOURCE)
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long, f"longer than {MAX_LINES} lines: {long}"


def test_library_has_no_python_symbol():
    library = ROOT / "python/torch_quartz/lib/libquartz.so"
    if not library.exists():  # an installed package under test, not the tree built in place
        import importlib.util

        library = pathlib.Path(importlib.util.find_spec("torch_quartz").origin).parent / "lib/libquartz.so"
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library)], check=True, capture_output=True, text=True
    ).stdout
    python = re.findall(r"\s(_?Py[A-Z_]\w*|\S*pybind11\S*)$", symbols, flags=re.MULTILINE)
    assert symbols and not python, f"libquartz.so needs symbols of Python: {python}"
    needed = subprocess.run(["readelf", "-d", str(library)], check=True, capture_output=True, text=True).stdout
    assert "libtorch_python" not in needed and "libpython" not in needed
    assert "[libtorch_cpu.so]" in needed, "the linker dropped libtorch_cpu"
