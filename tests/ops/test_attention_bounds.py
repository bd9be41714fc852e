"""`attention` with `key_begin` and `key_end`: what is seen, and the bits of a padded sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_quartz.ops import attention
from torch_quartz.testing import same_bits

DTYPES = [torch.float32, torch.bfloat16]


def random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to("quartz")


def integers(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device="quartz")


def masked(query, key, value, visible, **options):
    """The reference: float64 on the CPU, from the formula."""
    q, k, v = (x.detach().cpu().double() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if (cap := options.get("soft_cap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("indices", [torch.int32, torch.int64])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": 3}, {"soft_cap": 2.0}], ids=str)
def test_what_is_seen(dtype, indices, options):
    batch, queries, keys = 3, 4, 9
    q, k, v = (random(i, batch, h, n, 8, dtype=dtype) for i, h, n in ((0, 4, queries), (1, 2, keys), (2, 2, keys)))
    begin, end = [0, 3, 7], [9, 8, 7]
    place = torch.arange(keys)
    visible = torch.stack([(place >= b) & (place < e) for b, e in zip(begin, end, strict=True)])[:, None, None]
    position = torch.arange(queries)[:, None] + keys - queries
    if options.get("causal"):
        visible = visible & (place <= position)
    if window := options.get("window"):
        visible = visible & (place > position - window)
    got = attention(
        q, k, v, key_begin=integers(*begin, dtype=indices), key_end=integers(*end, dtype=indices), **options
    )
    expected = masked(q, k, v, visible, **options)
    torch.testing.assert_close(
        got.cpu().double(),
        expected,
        **{"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2},
    )
    assert (got[2] == 0).all()  # a sequence without keys


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 6),
    st.integers(0, 40),
    st.integers(0, 150),
    st.one_of(st.none(), st.integers(1, 60)),
    st.sampled_from([None, 5.0]),
    st.integers(0, 9),
)
def test_padding_changes_no_bits(dtype, queries, before, padding, window, soft_cap, seed):
    """A sequence behind `padding` slots of NaN, beside another one: the bits of the sequence alone."""
    keys = before + queries
    q = random(seed, 2, 4, queries, 16, dtype=dtype)
    k, v = (random(seed + i, 2, 2, keys + padding, 16, dtype=dtype) for i in (1, 2))
    k[1, :, :padding], v[1, :, :padding] = torch.nan, torch.nan
    options = {"causal": True, "window": window, "soft_cap": soft_cap}
    got = attention(q, k, v, key_begin=integers(0, padding), **options)
    alone = attention(q[1:], k[1:, :, padding:], v[1:, :, padding:], **options)
    assert same_bits(got[1], alone[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_that_has_dropped_keys_has_the_bits_of_the_whole(dtype):
    q, k, v = (random(i, 2, 4, n, 16, dtype=dtype) for i, n in ((0, 3), (1, 300), (2, 300)))
    whole = attention(q, k, v, causal=True, window=50)
    dropped = 240
    cut = attention(
        q, k[:, :, dropped:], v[:, :, dropped:], causal=True, window=50, key_begin=integers(-dropped, -dropped)
    )
    assert same_bits(cut, whole)


def test_gradients():
    q, k, v = (random(i, 2, h, n, 8).requires_grad_() for i, h, n in ((0, 4, 5), (1, 2, 7), (2, 2, 7)))
    begin, end = integers(2, 0), integers(7, 6)
    mask = torch.arange(7, device="quartz")
    mask = ((mask >= begin[:, None]) & (mask < end[:, None]))[:, None, None]
    weights = random(3, 2, 4, 5, 8)
    gradients = []
    for options in ({"key_begin": begin, "key_end": end}, {"mask": mask}):
        attention(q, k, v, causal=True, **options).mul(weights).sum().backward()
        gradients.append([tensor.grad.clone() for tensor in (q, k, v)])
        for tensor in (q, k, v):
            tensor.grad = None
    for with_bounds, with_mask in zip(*gradients, strict=True):
        torch.testing.assert_close(with_bounds, with_mask)


@pytest.mark.parametrize(
    "bounds, message",
    [
        ({"key_begin": torch.zeros(3, dtype=torch.int64)}, "key_begin must have one element for each sequence"),
        ({"key_end": torch.zeros(2)}, "key_end must be int32 or int64"),
        ({"key_begin": torch.zeros(2, 1, dtype=torch.int64)}, "key_begin must have one element for each sequence"),
    ],
)
def test_bad_bounds_are_named(bounds, message):
    q = random(0, 2, 2, 3, 8)
    with pytest.raises(RuntimeError, match=message):
        attention(q, q, q, **{name: value.to("quartz") for name, value in bounds.items()})
    with pytest.raises(RuntimeError, match="key_begin must be on the device of query"):
        attention(q, q, q, key_begin=torch.zeros(2, dtype=torch.int64))
