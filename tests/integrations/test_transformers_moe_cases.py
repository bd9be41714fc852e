"""Reported failures of mixture-of-experts layers (C1, C2 of our list), seen from whole blocks of Transformers' models.

The reference is the same block on the CPU. The kernels' side is in `tests/ops/test_kernel_cases.py`.
"""

import copy
import math

import pytest
import torch
from model_zoo import available, build
from torch_quartz.testing import same_bits

BLOCKS = {"qwen3_moe": 0, "qwen3_next": 0, "gpt_oss": 0, "mixtral": 0, "deepseek_v3": 1, "glm4_moe": 1}  # name: layer
NAMES = [name for name in BLOCKS if name in available()]
# The kernels of a GPU serve sizes in multiples of 64 and 16-bit types; others run expert by expert there.
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}


@pytest.fixture(params=NAMES)
def blocks(request):
    """The block on the CPU, and the same one on quartz."""
    block = build(request.param, **WIDE).model.layers[BLOCKS[request.param]].mlp.float()
    return block, copy.deepcopy(block).to("quartz")


def run(block, x):
    with torch.no_grad():
        out = block(x)
    return out[0] if isinstance(out, tuple) else out


def hidden(rows, tokens, seed=0):
    return torch.randn(rows, tokens, 64, generator=torch.Generator().manual_seed(seed))


def close(got, expected):
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", [0.0, 1e30, math.nan, math.inf])
def test_padded_tokens(blocks, padding):
    """C1: what stands in padded positions, and in free memory, changes no bit of the others."""
    plain, there = blocks
    x = hidden(2, 9)
    x[0, :4] = 0
    clean = run(there, x.to("quartz"))
    close(clean, run(plain, x))
    x[0, :4] = padding
    blocks_of_nan = [torch.full((2**power,), math.nan, device="quartz") for power in range(6, 20) for _ in range(4)]
    del blocks_of_nan
    got = run(there, x.to("quartz"))
    assert same_bits(got[0, 4:], clean[0, 4:]) and same_bits(got[1], clean[1])


def test_few_and_no_tokens(blocks):
    """C2: an empty batch comes back empty; one token alone has the bits it has among others."""
    plain, there = blocks
    assert run(there, torch.empty(1, 0, 64, device="quartz")).shape == (1, 0, 64)
    assert run(there, torch.empty(0, 5, 64, device="quartz")).shape == (0, 5, 64)
    x = hidden(1, 17, seed=1)
    whole = run(there, x.to("quartz"))
    close(whole, run(plain, x))
    for token in (0, 16):
        assert same_bits(run(there, x[:, token : token + 1].to("quartz")), whole[:, token : token + 1])


@pytest.mark.parametrize("wanted", [[0, 1], [2, 3], [1, 2]], ids=str)
def test_all_tokens_to_two_experts(blocks, wanted):
    """C2: the first or the last experts are empty, all tokens go to the same ones."""
    for block in blocks:
        router = block.gate if hasattr(block, "gate") else block.router
        with torch.no_grad():
            router.weight.zero_()
            router.weight[wanted] = 1.0
    plain, there = blocks
    x = hidden(1, 17, seed=2).abs()  # so that their logits are the largest
    close(run(there, x.to("quartz")), run(plain, x))
