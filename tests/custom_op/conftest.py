"""Fixtures of the tests of operators that others write."""

import sys
from pathlib import Path

import pytest
import torch
from cpp_build import compile_library

FOLDER = Path(__file__).parent

# Triton is no part of a CPU build of PyTorch; there is nothing to test for it on the host substrate.
collect_ignore = ["test_triton.py"] if torch.quartz.substrate() == "host" else []


@pytest.fixture(scope="session")
def thirdparty(tmp_path_factory):
    """Build and load the extension that knows nothing of quartz; return its operators."""
    target = tmp_path_factory.mktemp("thirdparty") / f"thirdparty{sys.version_info.minor}.so"
    torch.ops.load_library(str(compile_library(FOLDER / "thirdparty.cpp", target)))
    return torch.ops.thirdparty
