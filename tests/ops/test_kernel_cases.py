"""Failures that users of other projects reported, as kernels see them, and the kind behind each.

Each docstring begins with the name of the case in our list (C experts, E sampling, F verification, I formats).
Those of one operator stand with its tests, under their names: E3, E5, E6, E7, F6 (`test_sample.py`), F2, F4
(`test_verify.py`), I1, I2 (`test_quantize.py`, `test_quantized_weight.py`), B in `tests/integrations`. Whole blocks of
models are in `tests/integrations/test_transformers_moe_cases.py`.
"""

import itertools
import math

import pytest
import torch
from test_moe_experts import loop
from torch_quartz import ops
from torch_quartz.testing import FLOATS, same_bits, surrounded

HOST = torch.quartz.substrate() == "host"
HALVES = [torch.bfloat16, torch.float16]


def random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def leave_nan_in_free_memory(dtype):
    """Allocate blocks of many sizes, fill them with NaN and free them, so that what comes next finds NaN there."""
    blocks = [
        torch.full((2**power,), math.nan, dtype=dtype, device="quartz") for power in range(6, 22) for _ in range(4)
    ]
    del blocks


def experts_of(count, hidden=64, width=64, dtype=torch.bfloat16, seed=1):
    """Weights of a size that the kernels of a GPU serve too."""
    up = random(count, 2 * width, hidden, dtype=dtype, seed=seed, scale=hidden**-0.5)
    return up, random(count, hidden, width, dtype=dtype, seed=seed + 1, scale=width**-0.5)


def run_experts(x, ids, weights, up, down):
    return ops.moe_experts(*(tensor.to("quartz") for tensor in (x, ids, weights, up, down))).cpu()


def close_to_the_loop(got, x, ids, weights, up, down):
    expected = loop(x=x, ids=ids, weights=weights, up=up, down=down)
    tolerance = 1e-4 if x.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


# ---- C: mixture of experts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ends", [[16, 32, 32, 48], [0, 0, 0, 0], [0, 0, 0, 1], [1, 2, 3, 63]], ids=str)
def test_rows_behind_the_last_offset(dtype, ends):
    """C1: rows of no group, weighted with 0 and added, must not bring NaN of recycled memory."""
    a, w = random(64, 32, dtype=dtype), random(4, 32, 16, dtype=dtype, seed=1)
    starts = [0, *ends[:-1]]
    exact = torch.zeros(64, 16, dtype=torch.float64)
    for group, (begin, end) in enumerate(zip(starts, ends, strict=True)):
        exact[begin:end] = a[begin:end].double() @ w[group].double()
    index = torch.randint(0, 20, (64,), generator=torch.Generator().manual_seed(2))
    weight = (torch.arange(64) < ends[-1]).to(dtype)[:, None]
    expected = torch.zeros(20, 16, dtype=torch.float64).index_add(0, index, exact)
    on_quartz = [tensor.to("quartz") for tensor in (a, w, torch.tensor(ends, dtype=torch.int32), weight, index)]
    for _ in range(3):
        leave_nan_in_free_memory(dtype)
        rows = torch._grouped_mm(on_quartz[0], on_quartz[1], offs=on_quartz[2])
        out = torch.zeros(20, 16, dtype=dtype, device="quartz").index_add(0, on_quartz[4], rows * on_quartz[3])
        tolerance = 1e-4 if dtype == torch.float32 else 0.3  # sums of up to 64 / 20 rounded values of up to 30
        torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", HALVES)
def test_padded_tokens_of_an_expert_layer(dtype):
    """C1: padding of NaN is skipped by id, other padding weighted with 0; the tokens have the bits they have alone."""
    x, weights, (up, down) = random(64, 64, dtype=dtype), torch.rand(64, 2), experts_of(4, dtype=dtype)
    ids = torch.randint(0, 4, (64, 2), generator=torch.Generator().manual_seed(4))
    alone = run_experts(x[:48], ids[:48], weights[:48], up, down)
    x[48:], ids[48:] = math.nan, -1
    leave_nan_in_free_memory(dtype)
    got = run_experts(x, ids, weights, up, down)
    assert same_bits(got[:48], alone) and not got[48:].any()
    close_to_the_loop(got[:48], x[:48], ids[:48], weights[:48], up, down)
    x[48:], ids[48:], weights[48:] = 0, 0, 0
    got = run_experts(x, ids, weights, up, down)
    assert same_bits(got[:48], alone) and not got[48:].any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("tokens", "chosen"),
    [(17, [5]), (1, [0]), (1, [7]), (17, [1, 2, 3, 4, 5, 6]), (0, [0]), (300, [3]), (33, [0, 7])],
    ids=str,
)
def test_no_tokens_and_experts_without_tokens(dtype, tokens, chosen):
    """C2: an empty batch, one expert that has all tokens, one token, the first and the last expert empty."""
    x, weights, (up, down) = random(tokens, 64, dtype=dtype), torch.rand(tokens, 1), experts_of(8, dtype=dtype)
    ids = torch.tensor(chosen)[torch.arange(tokens) % len(chosen)].reshape(tokens, 1)
    got = run_experts(x, ids, weights, up, down)
    assert got.shape == (tokens, 64)
    close_to_the_loop(got, x, ids, weights, up, down)
    routed, chosen_ids = ops.moe_topk(torch.zeros(tokens, 8, device="quartz"), 1)
    assert routed.shape == chosen_ids.shape == (tokens, 1)
    ends = torch.bincount(ids[:, 0], minlength=8).cumsum(0).int()
    rows = torch._grouped_mm(x.to("quartz"), up.to("quartz").transpose(1, 2), offs=ends.to("quartz"))
    expected = torch.stack([up[e].double() @ row.double() for row, e in zip(x, ids[:, 0].sort().values, strict=True)] or
                           [torch.zeros(128, dtype=torch.float64)])[:tokens]  # fmt: skip
    torch.testing.assert_close(rows.cpu().double(), expected, rtol=2e-2, atol=2e-2)


def test_an_inner_dimension_of_zero():
    """C2: a product over nothing is zeros, whatever the strides of its operands say."""
    ends = torch.tensor([3, 3, 5], dtype=torch.int32, device="quartz")
    for x in (torch.empty(5, 0), torch.empty(0, 5).t(), torch.empty(5, 8)[:, 8:]):
        for w in (torch.empty(3, 0, 16), torch.empty(3, 16, 0).transpose(1, 2)):
            for dtype in FLOATS:
                leave_nan_in_free_memory(dtype)
                rows = torch._grouped_mm(x.to("quartz", dtype), w.to("quartz", dtype), offs=ends)
                assert rows.shape == (5, 16) and not rows.any()


SIZES = [1, 127, 129, 0, 63, 5]


@pytest.mark.parametrize("k", [128, 192, 256])
@pytest.mark.parametrize("dtype", HALVES)
def test_small_and_unaligned_groups(dtype, k):
    """C3: groups of any number of rows, in a plain and a quantised layer, have the bits that each row has alone."""
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(SIZES))[:, None]
    x, weights = random(len(ids), k, dtype=dtype), torch.ones(len(ids), 1)
    up, down = experts_of(6, k, 128, dtype)
    got = run_experts(x, ids, weights, up, down)
    close_to_the_loop(got, x, ids, weights, up, down)
    starts = [0, *torch.tensor(SIZES).cumsum(0).tolist()]
    for begin, end in itertools.pairwise(starts):
        if begin < end:
            group = [tensor[begin:end] for tensor in (x, ids, weights)]
            assert same_bits(run_experts(*group, up, down), got[begin:end])
    quantised = []
    for matrices in (up, down):
        parts = [ops.quantize_fp8(matrix.float(), "block", 64) for matrix in matrices]
        codes, scales = (torch.stack(part) for part in zip(*parts, strict=True))
        quantised.append(ops.QuantizedWeight(codes, scales, None, "fp8", matrices.shape[-1], 64).to("quartz"))
    there = [tensor.to("quartz") for tensor in (x, ids, weights)]
    got = ops.moe_experts_quantized(*there, *quantised).cpu()
    close_to_the_loop(got, x, ids, weights, *(weight.dequantize(dtype).cpu() for weight in quantised))


@pytest.mark.parametrize("capacity", [8, 16, 32])
def test_rows_beyond_a_count_are_not_touched(capacity):
    """C3: rows behind an expert's count, of NaN, change no result and are not written."""
    counts = torch.tensor([capacity, 1, 0, capacity - 1, 5])
    place = torch.arange(capacity)
    valid = (place < counts[:, None]).flatten()
    ids = torch.where(valid, torch.arange(5).repeat_interleave(capacity), -1)[:, None]
    x, (up, down) = random(5 * capacity, 64, dtype=torch.bfloat16), experts_of(5)
    weights = torch.ones(5 * capacity, 1)
    expected = run_experts(x[valid], ids[valid], weights[valid], up, down)
    x[~valid], weights[~valid] = math.nan, math.nan
    frame = surrounded(x.to("quartz"))
    got = ops.moe_experts(frame, *(tensor.to("quartz") for tensor in (ids, weights, up, down))).cpu()
    assert same_bits(got[valid], expected) and not got[~valid].any()
    assert frame.isnan().sum() == int((~valid).sum()) * 64  # what was read is as it was


@pytest.mark.large_memory(12)
def test_more_elements_than_32_bits_count_in_an_expert_layer():
    """C4: 40,000 tokens x 8 experts x 7168 = 2,293,760,000 elements; the last tokens are as they are alone."""
    tokens, hidden, width = 40_000, 7168, 8 if HOST else 64
    up, down = (weights.to("quartz") for weights in experts_of(8, hidden, width))
    x = random(tokens, 64, dtype=torch.bfloat16).repeat(1, hidden // 64).to("quartz")
    ids = torch.arange(8, device="quartz").expand(tokens, 8).contiguous()
    weights = torch.rand(tokens, 8, device="quartz")
    got = ops.moe_experts(x, ids, weights, up, down)
    for part in (slice(0, 16), slice(tokens - 16, None)):
        assert same_bits(got[part], ops.moe_experts(x[part], ids[part], weights[part], up, down))


ROWS = {
    "rms_norm": lambda x: ops.rms_norm(x, torch.ones(512, dtype=x.dtype, device="quartz")),
    "softmax": lambda x: x.softmax(-1),
    "gated_activation": ops.silu_and_mul,
    "sum": lambda x: x.sum(-1),
    "argmax": lambda x: x.argmax(-1),
    "topk": lambda x: x.topk(2, -1).values,
}


@pytest.mark.large_memory(32)
@pytest.mark.parametrize("name", ROWS)
def test_more_elements_than_32_bits_count_in_rows(name):
    """C4: rows of (98304, 64, 512), 3.2e9 elements, are those of four slices of it."""
    x = random(96, 64, 512, dtype=torch.bfloat16).to("quartz").repeat(1024, 1, 1)
    x[-1] *= 3
    whole = ROWS[name](x)
    for begin in range(0, 98304, 24576):
        assert torch.equal(whole[begin : begin + 24576], ROWS[name](x[begin : begin + 24576]))


@pytest.mark.parametrize("name", ["sum", "argmax", "topk"])
def test_more_rows_times_elements_than_32_bits_count(name):
    """C4: the same with rows that share memory, which needs little of it."""
    x = random(64, 512, dtype=torch.bfloat16).to("quartz")
    whole = ROWS[name](x.expand(70_000, 64, 512))
    assert torch.equal(whole[-1], ROWS[name](x)) and torch.equal(whole[65_536], ROWS[name](x))


def test_all_tokens_to_one_expert_keep_their_order():
    """C7: four tokens, all to expert 0: each counts once, in its own place."""
    x, (up, down) = random(4, 64, dtype=torch.bfloat16), experts_of(1)
    ids, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    got = run_experts(x, ids, weights, up, down)
    close_to_the_loop(got, x, ids, weights, up, down)
    for token in range(4):
        part = slice(token, token + 1)
        assert same_bits(got[part], run_experts(x[part], ids[part], weights[part], up, down))


@pytest.mark.parametrize("tokens", [1, 7, 60_000])
@pytest.mark.parametrize("experts", [3, 60, 384, 512])
def test_unusual_numbers_of_experts(experts, tokens):
    """C7: winners in the last places; `torch.topk` agrees, and every token is used exactly k times."""
    k = min(experts, 8)
    logits = random(tokens, experts, seed=experts)
    logits[:, -k:] = 20 + random(tokens, k).argsort(-1) / 4  # different in every row, so that no two are equal
    weights, ids = ops.moe_topk(logits.to("quartz"), k)
    assert torch.equal(ids.cpu(), logits.topk(k).indices)
    assert (ids.cpu().sort().values == torch.arange(experts - k, experts)).all()
    chosen = logits.topk(k).values.softmax(-1)
    torch.testing.assert_close(weights.cpu(), chosen, rtol=1e-4, atol=1e-6)
    # Experts that give the same for every token: the sum over k of them is k times that of one.
    x = torch.zeros(tokens, 64, dtype=torch.bfloat16)
    x[:, 0] = 1
    up = torch.zeros(experts, 128, 64, dtype=torch.bfloat16)
    up[:, :, 0] = 1
    down = torch.zeros(experts, 64, 64, dtype=torch.bfloat16)
    down[:, :, 0] = 1
    there = [tensor.to("quartz") for tensor in (x, ids, torch.ones(tokens, k), up, down)]
    one = ops.moe_experts(there[0][:1], there[1][:1, :1], there[2][:1, :1], up.to("quartz"), down.to("quartz"))
    assert one.unique().numel() == 1 and one[0, 0] > 0
    torch.testing.assert_close(ops.moe_experts(*there), (one * k).expand(tokens, 64))


@pytest.mark.parametrize("dtype", HALVES)
def test_experts_of_two_ranks_add_up(dtype):
    """C8: ids of experts elsewhere are -1 and add nothing; a rank may have no tokens of its own, or none at all."""
    (up, down), x = experts_of(8, dtype=dtype), random(1002, 64, dtype=dtype)
    ids = torch.zeros(1002, 1, dtype=torch.int64)
    ids[-2:] = 3  # 1000 tokens to expert 0, 2 to expert 3: all on rank 0
    weights = torch.rand(1002, 1)
    whole = run_experts(x, ids, weights, up, down)
    close_to_the_loop(whole, x, ids, weights, up, down)
    rank0 = run_experts(x, ids, weights, up[:4], down[:4])
    rank1 = run_experts(x, torch.full_like(ids, -1), weights, up[4:], down[4:])
    assert same_bits(rank0, whole) and not rank1.any()
    assert run_experts(x[:0], ids[:0], weights[:0], up[4:], down[4:]).shape == (0, 64)

    some, weights = torch.tensor([[0, -1], [-1, -1], [3, 1]]), torch.rand(3, 2)
    got = run_experts(x[:3], some, weights, up[:4], down[:4])
    assert not got[1].any()
    close_to_the_loop(got, x[:3], some, weights, up[:4], down[:4])
    for token, slot in ((0, 0), (2, 0), (2, 1)):  # the other slot of the token on another rank
        mine = some[token : token + 1].clone()
        mine[0, 1 - slot] = -1
        part = x[token : token + 1], mine, weights[token : token + 1]
        close_to_the_loop(run_experts(*part, up[:4], down[:4]), *part, up[:4], down[:4])


# ---- E: sampling -----------------------------------------------------------------------------------------------------


def sampled(logits, count, **arguments):
    """Return `count` draws from one row at positions 0, 1, ..."""
    positions = torch.arange(count, device="quartz")
    return ops.sample(logits.to("quartz").expand(count, -1), positions=positions, logprobs=False, **arguments).tokens


@pytest.mark.parametrize("replacement", [False, True])
def test_categories_of_weight_zero_are_never_drawn(replacement):
    """E1: (100000, 2) rows with all weight in column 1, a hole in the middle, runs of zeros at both ends."""
    torch.manual_seed(0)
    one = torch.tensor([0.0, 1.0], device="quartz").expand(100_000, 2).contiguous()
    for _ in range(100 if HOST or replacement else 1000):
        assert (torch.multinomial(one, 1, replacement) == 1).all()
    hole = torch.tensor([0.33, 0.34, 0, 0.33], device="quartz")
    if replacement:
        drawn = torch.multinomial(hole, 10_000_000, True)
    else:
        drawn = torch.multinomial(hole.expand(10_000_000, 4), 1)
    counts = torch.bincount(drawn.flatten().cpu(), minlength=4)
    assert counts[2] == 0 and counts.sum() == 10_000_000
    assert (counts[[0, 1, 3]] - torch.tensor([3.3e6, 3.4e6, 3.3e6])).abs().max() < 5 * math.sqrt(1e7 * 0.33 * 0.67)
    for dtype in FLOATS:
        runs = torch.zeros(32_000, dtype=dtype, device="quartz")
        runs[15_000:15_003] = 1e-3
        drawn = torch.multinomial(runs.expand(2000, -1), 1, replacement)
        assert set(drawn.unique().tolist()) == {15_000, 15_001, 15_002}


@pytest.mark.parametrize("dtype", FLOATS)
def test_tokens_of_probability_zero_are_never_sampled(dtype):
    """E1: the same of the sampler, whose range is open at both ends."""
    assert (sampled(torch.tensor([-math.inf, 0.0]).to(dtype), 1_000_000) == 1).all()
    counts = torch.bincount(sampled(torch.tensor([0.33, 0.34, 0, 0.33]).log(), 10_000_000).cpu(), minlength=4)
    assert counts[2] == 0 and counts.sum() == 10_000_000
    one = torch.full((32_000,), -math.inf, dtype=dtype)
    one[1] = 0
    assert (sampled(one, 500, top_k=2**30, top_p=1.0) == 1).all()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_uniform_numbers_stay_below_the_bound(dtype):
    """E8: ten million numbers, none of them 1 or 4 after rounding; no exact zero under a logarithm."""
    torch.manual_seed(0)
    x = torch.rand(10_000_000, dtype=dtype, device="quartz")
    assert x.min() >= 0 and x.max() < 1
    assert x.uniform_(0, 4).min() >= 0 and x.max() < 4
    x.exponential_()
    assert x.min() > 0 if dtype == torch.float32 else x.min() >= 0
    assert x.isfinite().all() and x.normal_().isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
def test_a_large_vocabulary_keeps_its_tail(dtype):
    """E9: 131,072 equal logits in 16 bits under top-p 0.9: 117,965 tokens are left and drawn evenly."""
    count, kept = 400 if HOST else 1_000_000, 117_965
    logits = torch.zeros(1, 131_072, dtype=dtype, device="quartz")
    seen = torch.zeros(131_072, dtype=torch.int64)
    for begin in range(0, count, 50_000):
        positions = torch.arange(begin, min(begin + 50_000, count), device="quartz")
        got = ops.sample(logits.expand(len(positions), -1), top_p=0.9, positions=positions)
        seen += torch.bincount(got.tokens.cpu(), minlength=131_072)
    assert seen.sum() == count and not seen[kept:].any()
    parts = seen[: kept // 32 * 32].reshape(32, -1).sum(1).double()
    statistic = ((parts - parts.mean()) ** 2 / parts.mean()).sum().item()
    assert statistic < 83  # chi-square of 31 degrees exceeds it with a chance of 1e-6
    torch.testing.assert_close(got.raw_logprobs[:3].cpu(), torch.full((3,), -math.log(131_072)))
    torch.testing.assert_close(got.logprobs[:3].cpu(), torch.full((3,), -math.log(kept)))
    drawn = torch.multinomial(torch.ones(131_072, dtype=dtype, device="quartz"), 100_000, True).cpu()
    parts = torch.bincount(drawn // 4096, minlength=32).double()
    assert ((parts - parts.mean()) ** 2 / parts.mean()).sum() < 83


# ---- F: verification -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_rows_of_target_and_draft(dtype):
    """F3: a NaN target row ends its request; a NaN draft row proposes nothing, and the token is the target's."""
    vocabulary = 129_280
    target = torch.full((2, vocabulary), -math.inf)
    target[0] = math.nan
    target[1, [0, 7]] = torch.tensor([1e-22, 0.97]).log()
    draft = torch.full((1, vocabulary), math.nan)
    target, draft = target.to("quartz", dtype), draft.to("quartz", dtype)
    assert ops.sample(draft).tokens.tolist() == [-1]
    tokens = ops.sample(target, positions=torch.arange(2, device="quartz")).tokens
    assert tokens.tolist() == [-1, 7]
    cu = torch.tensor([0, 0, 1], device="quartz")
    rows = torch.stack([tokens[0], tokens[1], tokens[1]])  # request 0 has no draft, request 1 has one
    for proposed in (0, -1, vocabulary, 7):
        got = ops.spec_verify(rows, torch.tensor([proposed], device="quartz"), cu)
        assert got.next_tokens.tolist() == [-1, 7]
        assert got.committed.tolist() == [0, 2 if proposed == 7 else 1]
        assert got.accepted.tolist() == [0, 1 if proposed == 7 else 0]


def test_a_mask_for_every_row_to_verify():
    """F5: each position of a draft has its own mask; a draft that breaks the grammar is rejected, not an error."""
    logits = random(4, 70, seed=3).to("quartz")
    allowed = [[3, 4], [5], [66, 69], []]
    bitmask = ops.token_bits(torch.tensor([[*row, *[-1] * (2 - len(row))] for row in allowed], device="quartz"), 70)
    tokens = ops.sample(logits, positions=torch.arange(4, device="quartz"), bitmask=bitmask).tokens
    assert all(token in row if row else token == -1 for token, row in zip(tokens.tolist(), allowed, strict=True))
    cu = torch.tensor([0, 3], device="quartz")
    illegal = ops.spec_verify(tokens, torch.stack([tokens[0], tokens[1] + 1, tokens[2]]), cu)
    assert illegal.committed.item() == 2 and illegal.next_tokens.item() == 5
    ended = ops.spec_verify(tokens, tokens[:3].contiguous(), cu)  # the grammar has ended: no token may follow
    assert ended.committed.item() == 3 and ended.next_tokens.item() == -1


# ---- I: NVFP4 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_scales_of_one_expert_do_not_reach_the_other(format, interleaved):
    """I4: two experts of 128 x 128 x 256, scales 1; those of expert 0 become 2, then NaN. Expert 1 keeps its bits."""
    group = 16 if format == "nvfp4" else 32
    one = 0x38 if format == "nvfp4" else 127  # 1.0
    two, nan = (0x40, 0x7F) if format == "nvfp4" else (128, 255)
    scale_dtype = torch.float8_e4m3fn if format == "nvfp4" else torch.float8_e8m0fnu

    def weight(rows, columns, first):
        generator = torch.Generator().manual_seed(columns)
        codes = torch.randint(0, 256, (2, rows, columns // 2), dtype=torch.uint8, generator=generator)
        scales = torch.full((2, rows, columns // group), one, dtype=torch.uint8)
        scales[0] = first
        return ops.QuantizedWeight(codes, scales.view(scale_dtype), None, format, columns).to("quartz")

    x = random(256, 256, dtype=torch.bfloat16).to("quartz")
    ids = (torch.arange(256) % 2)[:, None].to("quartz")
    weights, results = torch.ones(256, 1, device="quartz"), []
    for first in (one, two, nan):
        up, down = weight(256, 256, first), weight(256, 128, one)
        results.append(ops.moe_experts_quantized(x, ids, weights, up, down, interleaved=interleaved))
    for got in results[1:]:
        assert same_bits(got[1::2], results[0][1::2])
    assert not same_bits(results[1][::2], results[0][::2]) and results[2][::2].isnan().all()
    with pytest.raises(RuntimeError, match="codes must"):  # the expert axis innermost is not a layout of stacks
        ops.linear_quantized(x[:5], ops.QuantizedWeight(up.codes.permute(1, 2, 0), up.scales, None, format, 256))
