"""Whole models: the logits of a position are the same bits however the position is computed.

The forms: the whole prompt at once (with and without gradients), in chunks through a cache, token by token, in batches
of other sizes and places, and padded left or right. Tiny random models of the decoder families of model_zoo.
"""

import inspect

import pytest
import torch
from model_zoo import VOCABULARY, available, build, case
from torch_quartz import determinism_report
from torch_quartz.testing import same_bits

DECODERS = [name for name in available() if case(name).head == "AutoModelForCausalLM"]
LENGTH = 12
DTYPES = [torch.float32, torch.bfloat16]
# What Transformers itself computes otherwise, on every device (docs/determinism.md, "Not covered").
OTHER_VALUES = {
    ("mamba", "chunk behind a state"): "its scan of several tokens begins with an empty state",
    ("deepseek_v4", "left"): "its compressed windows are counted from the padded start",
}
CASES = [(n, d) for n in DECODERS for d in DTYPES]


def prompt(seed: int, rows: int = 1, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed)).to("quartz")


@pytest.fixture(scope="module", params=CASES, ids=str)
def model(request):
    name, dtype = request.param
    return build(name).to("quartz", dtype).eval()


@pytest.fixture(scope="module")
def whole(model):
    """The logits of one prompt, computed alone and at once."""
    with torch.no_grad():
        return model(prompt(1), use_cache=False).logits[0]


def with_cache(model, ids, cache):
    """Return the logits of a piece and the cache behind it; models have several names for it."""
    accepted = inspect.signature(model.forward).parameters
    name = next(name for name in ("past_key_values", "cache_params", "cache") if name in accepted)
    output = model(ids, **{name: cache}, use_cache=True)
    found = (getattr(output, key, None) for key in ("past_key_values", "cache_params", "cache"))
    return output.logits[0], next(value for value in found if value is not None)


def differing(got, expected):
    rows = [i for i in range(len(expected)) if not same_bits(got[i], expected[i])]
    return f"positions {rows} differ by up to {(got.float() - expected.float()).abs().max().item():.1e}" if rows else ""


def test_with_gradients(model, whole):
    assert not differing(model(prompt(1), use_cache=False).logits[0].detach(), whole)


@pytest.mark.parametrize("sizes", [(7, 5), (1, 3, 8), (1,) * LENGTH], ids=str)
def test_chunks_through_a_cache(model, whole, sizes):
    if any(size > 1 for size in sizes[1:]) and (model.config.model_type, "chunk behind a state") in OTHER_VALUES:
        sizes = (sizes[0], *(1,) * (LENGTH - sizes[0]))
    cache, parts = None, []
    with torch.no_grad():
        for piece in prompt(1).split(sizes, 1):
            logits, cache = with_cache(model, piece, cache)
            parts.append(logits)
    assert not differing(torch.cat(parts), whole)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33, 64])
def test_batches(model, whole, rows):
    batch = prompt(2, rows)
    for place in {0, rows // 2, rows - 1}:
        batch[place] = prompt(1)[0]
        with torch.no_grad():
            assert not differing(model(batch, use_cache=False).logits[place], whole), f"row {place} of {rows}"


def test_report_is_empty(model):
    """A prompt of padded rows and tokens behind it run no operator without a proof."""
    ids, mask = prompt(3, 2), torch.ones(2, LENGTH, dtype=torch.int64, device="quartz")
    mask[0, :3] = 0
    torch.quartz.reset_op_counts()
    with torch.no_grad():
        model(ids, attention_mask=mask, use_cache=False)
        _, cache = with_cache(model, prompt(1), None)
        with_cache(model, prompt(2, 1, 1), cache)
    assert determinism_report() == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(model, whole, side):
    padding = 0 if (model.config.model_type, side) in OTHER_VALUES else 5
    ids, mask = prompt(3, 3, LENGTH + padding), torch.ones(3, LENGTH + padding, dtype=torch.int64, device="quartz")
    real = slice(padding, None) if side == "left" else slice(0, LENGTH)
    ids[1], mask[1] = 0, 0
    ids[1, real], mask[1, real] = prompt(1)[0], 1
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert torch.isfinite(logits).all()
    assert not differing(logits[1, real], whole)
