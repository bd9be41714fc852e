"""Attention on the device: rows without a key (case B1), every argument (B7), padded soft-capping models (B6)."""

import pytest
import torch
import transformers_jobs as jobs
from model_zoo import build
from torch.nn.functional import scaled_dot_product_attention as attention

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def native():
    return "cpu" if torch.quartz.substrate() == "host" else "cuda"


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(function, *arguments, **options):
    """Return a function's result on quartz and on the native device, as CPU tensors."""

    def move(value, device):
        return value.to(device) if isinstance(value, torch.Tensor) else value

    results = []
    for device in ("quartz", native()):
        moved = [move(value, device) for value in arguments]
        results.append(function(*moved, **{key: move(value, device) for key, value in options.items()}).detach().cpu())
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("additive", [True, False])
def test_row_whose_keys_are_all_masked_is_zero(dtype, grad, additive):
    q, k, v = (random(1, 1, 2, 4, dtype=dtype, seed=seed) for seed in range(3))
    mask = torch.tensor([[False, False], [True, True]])
    if additive:
        mask = torch.zeros(2, 2, dtype=dtype).masked_fill(~mask, float("-inf"))
    with torch.set_grad_enabled(grad):
        ours = attention(*(tensor.to("quartz") for tensor in (q, k, v)), attn_mask=mask.to("quartz")).cpu()
    assert not ours.isnan().any()
    assert torch.equal(ours[0, 0, 0], torch.zeros(4, dtype=dtype))
    exact = attention(q.double(), k.double(), v.double())[0, 0, 1]
    torch.testing.assert_close(ours[0, 0, 1].double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("additive", [True, False])
def test_gradients_of_a_masked_row_are_finite(additive):
    mask = torch.tensor([[False, False], [True, True]])
    if additive:
        mask = torch.zeros(2, 2).masked_fill(~mask, float("-inf"))
    inputs = [random(1, 1, 2, 4, seed=seed).to("quartz").requires_grad_() for seed in range(3)]
    attention(*inputs, attn_mask=mask.to("quartz")).sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in inputs)
    assert torch.equal(inputs[0].grad[0, 0, 0].cpu(), torch.zeros(4))


ARGUMENTS = {
    "grouped queries": ([(1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8)], {"enable_gqa": True}),
    "narrow value heads": ([(1, 1, 16, 32), (1, 1, 16, 32), (1, 1, 16, 24)], {}),
    "causal, more keys than queries": ([(1, 2, 3, 8), (1, 2, 8, 8), (1, 2, 8, 8)], {"is_causal": True}),
    "scale": ([(1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)], {"scale": 0.3}),
    "no dropout": ([(1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)], {"dropout_p": 0.0}),
    "three dimensions": ([(2, 4, 8), (2, 4, 8), (2, 4, 8)], {}),
    "no rows": ([(1, 2, 0, 8), (1, 2, 4, 8), (1, 2, 4, 8)], {}),
    "five dimensions": ([(2, 1, 2, 4, 8), (2, 1, 2, 4, 8), (2, 1, 2, 4, 8)], {}),
}


@pytest.mark.parametrize("name", list(ARGUMENTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_argument_means_what_it_means_natively(name, dtype):
    shapes, options = ARGUMENTS[name]
    q, k, v = (random(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    ours, theirs = both(attention, q, k, v, **options)
    assert ours.shape == (*shapes[0][:-1], shapes[2][-1])
    # The CPU's kernel rounds probabilities to bfloat16, quartz's does not.
    torch.testing.assert_close(ours, theirs, **({"rtol": 1.6e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}))


@pytest.mark.parametrize("layout", ["contiguous", "last stride not 1", "expanded"])
@pytest.mark.parametrize("grad", [True, False])
def test_mask_layouts_mean_the_same(layout, grad):
    masks = {
        "contiguous": random(1, 4, 12, 12, seed=3),
        "last stride not 1": random(12, 12, 4, seed=3).permute(2, 0, 1)[None],
        "expanded": random(1, 1, 12, 12, seed=3).expand(2, 4, 12, 12),
    }
    q, k, v = (random(2, 4, 12, 8, seed=seed) for seed in range(3))
    with torch.set_grad_enabled(grad):
        ours, theirs = both(attention, q, k, v, attn_mask=masks[layout])
        plain, _ = both(attention, q, k, v, attn_mask=masks[layout].contiguous())
    torch.testing.assert_close(ours, theirs)
    assert jobs.same_bits(ours, plain)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["default", "eager"])
def test_padded_rows_of_a_soft_capping_model_equal_the_single_prompts(side, implementation):
    options = {} if implementation == "default" else {"attn_implementation": implementation}
    model = build("gemma2", **options).to("quartz", torch.bfloat16)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]]
    width = max(map(len, prompts))
    ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
    for row, tokens in enumerate(prompts):
        where = slice(width - len(tokens), width) if side == "left" else slice(len(tokens))
        ids[row, where], mask[row, where] = torch.tensor(tokens), 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        logits = model(**{key: value.to("quartz") for key, value in inputs.items()}).logits.cpu()
        assert logits.isfinite().all()
        for row, tokens in enumerate(prompts):
            alone = model(input_ids=torch.tensor([tokens], device="quartz")).logits[0].cpu()
            # bf16 sums of other lengths: two units in the last place of logits below 1
            torch.testing.assert_close(logits[row][mask[row].bool()], alone, rtol=2e-2, atol=8e-3)
