"""Fixtures of the tests of the kernels."""

import pytest
from torch_quartz import _C


@pytest.fixture
def instruction_sets():
    """Return a generator that switches the CPU kernels to each instruction set of this machine in turn."""
    best = _C.cpu_isa()

    def switch():
        for isa in ("avx2", "avx512", "avx512_bf16"):
            _C.limit_cpu_isa(isa)
            if _C.cpu_isa() == isa:
                yield isa

    yield switch
    _C.limit_cpu_isa(best)
