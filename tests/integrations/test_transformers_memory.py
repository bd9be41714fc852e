"""Peak memory of a Transformers forward pass and of a training step: at most 1.02 times the native device's."""

import importlib.util
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[1] / "bench" / "bench_memory.py"
_SPEC = importlib.util.spec_from_file_location("bench_memory", _FILE)
bench_memory = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench_memory)


@pytest.mark.parametrize("work", bench_memory.WORK)
def test_peak_memory(work):
    theirs = bench_memory.peak(work, bench_memory.native())
    ours = bench_memory.peak(work, "quartz")
    assert ours <= 1.02 * theirs, f"{work}: {ours / 2**20:.1f} MiB on quartz, {theirs / 2**20:.1f} MiB natively"
