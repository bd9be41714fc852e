"""Whole models: the logits of a position are the same bits however the position is computed.

The forms: the whole prompt at once (with and without gradients), in chunks through a cache, token by token, in batches
of other sizes and places, and padded left or right. Tiny random models of the decoder families of model_zoo.
"""

import pytest
import torch
from model_zoo import VOCABULARY, available, build, case
from torch_quartz.testing import same_bits

DECODERS = [name for name in available() if case(name).head == "AutoModelForCausalLM"]
LENGTH = 12
DTYPES = [torch.float32, torch.bfloat16]
# docs/determinism.md, "Not covered": what these models run beside the kernels of this project.
NOT_COVERED = {
    "mamba": "convolution, and a scan whose form depends on the cache",
    "qwen3_next": "convolution, linalg_solve_triangular, and another algorithm for a token with a cache",
    "deepseek_v4": "sums and softmax over other dimensions than the last, ties in its index",
}
CASES = [(n, d) for n in DECODERS for d in DTYPES if n not in NOT_COVERED and (n, d) not in NOT_COVERED]


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


def differing(got, expected):
    rows = [i for i in range(len(expected)) if not same_bits(got[i], expected[i])]
    return f"positions {rows} differ by up to {(got.float() - expected.float()).abs().max().item():.1e}" if rows else ""


def test_with_gradients(model, whole):
    assert not differing(model(prompt(1), use_cache=False).logits[0].detach(), whole)


@pytest.mark.parametrize("sizes", [(7, 5), (1, 3, 8), (1,) * LENGTH], ids=str)
def test_chunks_through_a_cache(model, whole, sizes):
    cache, parts, at = None, [], 0
    with torch.no_grad():
        for size in sizes:
            out = model(prompt(1)[:, at : at + size], past_key_values=cache, use_cache=True)
            cache, at = out.past_key_values, at + size
            parts.append(out.logits[0])
    assert not differing(torch.cat(parts), whole)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 33, 64])
def test_batches(model, whole, rows):
    batch = prompt(2, rows)
    for place in {0, rows // 2, rows - 1}:
        batch[place] = prompt(1)[0]
        with torch.no_grad():
            assert not differing(model(batch, use_cache=False).logits[place], whole), f"row {place} of {rows}"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(model, whole, side):
    padding = 5
    ids, mask = prompt(3, 3, LENGTH + padding), torch.ones(3, LENGTH + padding, dtype=torch.int64, device="quartz")
    real = slice(padding, None) if side == "left" else slice(0, LENGTH)
    ids[1], mask[1] = 0, 0
    ids[1, real], mask[1, real] = prompt(1)[0], 1
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert torch.isfinite(logits).all()
    assert not differing(logits[1, real], whole)
