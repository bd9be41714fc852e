"""uniform_, normal_, exponential_ and bernoulli_ from seed and offset: formulas, distributions, layout, bounds."""

import math

import pytest
import random_reference as reference
import torch
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

DEVICES = ["quartz", "cpu"] + (["cuda"] if torch.cuda.is_available() else [])
FILLS = {
    "uniform": lambda x, seed, offset=0: ops.uniform_(x, seed, offset, -2.0, 3.0),
    "normal": lambda x, seed, offset=0: ops.normal_(x, seed, offset, 0.5, 2.0),
    "exponential": lambda x, seed, offset=0: ops.exponential_(x, seed, offset, 1.5),
    "bernoulli": lambda x, seed, offset=0: ops.bernoulli_(x, 0.3, seed, offset),
}
CUMULATIVE = {
    "uniform": lambda x: (x + 2) / 5,
    "normal": lambda x: torch.special.ndtr((x - 0.5) / 2),
    "exponential": lambda x: 1 - torch.exp(-1.5 * x),
}


@pytest.mark.parametrize("seed", [0, 2**63 - 1, -5])
@pytest.mark.parametrize("offset", [0, 2**32 - 3])
def test_formulas(seed, offset):
    x = torch.empty(38, device="quartz")
    assert ops.uniform_(x, seed, offset).tolist() == reference.uniform(seed, offset, 38)
    assert ops.bernoulli_(x, 0.3, seed, offset).tolist() == reference.bernoulli(seed, offset, [0.3] * 38)
    assert ops.exponential_(x, seed, offset, 1.5).tolist() == reference.exponential(seed, offset, 38, 1.5)
    assert ops.normal_(x, seed, offset, 0.5, 2.0).tolist() == reference.normal(seed, offset, 38, 0.5, 2.0)
    wide = x.double()
    assert ops.normal_(wide, seed, offset, 0.5, 2.0).tolist() == reference.wide_normal(seed, offset, 38, 0.5, 2.0)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_do_not_depend_on_layout_device_threads_or_instruction_set(fill, dtype, instruction_sets):
    want, threads = FILLS[fill](torch.empty(17, 131, dtype=dtype, device="quartz"), 9, 4), torch.get_num_threads()
    try:
        for _ in instruction_sets():
            for device in DEVICES:
                torch.set_num_threads(3 if device == "cpu" else 1)
                x = torch.empty(17, 131, dtype=dtype, device=device)
                larger = surrounded(x)
                for layout in (x, larger, torch.empty(131, 17, dtype=dtype, device=device).t()):
                    assert FILLS[fill](layout, 9, 4) is layout and same_bits(layout, want)
                frame = larger.as_strided((23 * 137,), (1,), 0)
                assert frame.isnan().sum() == 23 * 137 - 17 * 131
    finally:
        torch.set_num_threads(threads)
    later = FILLS[fill](torch.empty(17 * 131 - 40, dtype=dtype, device="quartz"), 9, 14)  # 10 offsets of 4 later
    assert same_bits(later, want.flatten()[40:])


@pytest.mark.parametrize("fill", CUMULATIVE)
def test_distributions(fill):
    x = FILLS[fill](torch.empty(400_001, device="quartz"), 5).cpu().double()
    p = CUMULATIVE[fill](x.sort().values)
    steps = torch.arange(len(x)) / len(x)
    assert (p - steps).abs().max() < 2.7 / math.sqrt(len(x))  # Kolmogorov: exceeded with a chance of 1e-6
    pairs = torch.stack([x[:-1], x[1:]])
    assert torch.corrcoef(pairs)[0, 1].abs() < 5 / math.sqrt(len(x))


def test_bernoulli_frequencies():
    count = 400_000
    for p in (0.0, 1e-3, 0.3, 1.0):
        ones = ops.bernoulli_(torch.empty(count, device="quartz"), p, 5).sum().item()
        assert abs(ones - p * count) <= 5 * math.sqrt(p * (1 - p) * count)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bounds(dtype):  # E8
    x = torch.empty(2_000_000, dtype=dtype, device="quartz")
    for low, high in ((0.0, 1.0), (0.0, 4.0), (-3.0, 0.1), (1.0, 1.0078125), (2.0, 2.0)):
        ops.uniform_(x, 0, 0, low, high)
        assert (x.min() >= torch.tensor(low, dtype=dtype) and (x.float() < high).all()) or low == high
    assert (ops.exponential_(torch.empty(2_000_000, device="quartz"), 1) > 0).all()
    assert ops.normal_(x, 2).isfinite().all() and (ops.normal_(x, 2, 0, 3.0, 0.0) == 3).all()


def test_registration_and_empty():
    ops.uniform_(torch.empty(0, 3, device="quartz"), 1)
    arguments = (torch.zeros(4, device="quartz"), "normal", 1, 0, 0.0, 1.0)
    torch.library.opcheck(
        torch.ops.quartz.random_fill_.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.uniform_(x.long(), 1), "self must be float32, float16, bfloat16 or float64, got Long"),
        (lambda x: ops.uniform_(x, 1, 0, 2.0, 1.0), "low must not be above high, got 2 and 1"),
        (lambda x: ops.normal_(x, 1, -1), "offset must be at least 0, got -1"),
        (lambda x: ops.normal_(x, 1, 0, 0.0, -1.0), "std must be at least 0, got -1"),
        (lambda x: ops.exponential_(x, 1, 0, 0.0), "rate must be above 0, got 0"),
        (lambda x: ops.bernoulli_(x, math.nan, 1), "p must be from 0 to 1, got nan"),
    ],
)
def test_errors(call, message):
    with pytest.raises(RuntimeError, match="quartz::random_fill_: " + message):
        call(torch.zeros(3, device="quartz"))
