"""Attention over given keys and values. Page: docs/ops/attention.md."""

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    query_offset: int | None = None,
    key_begin: Tensor | None = None,
    key_end: Tensor | None = None,
    return_logsumexp: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention, ``softmax(cap(scale * query @ key^T) + mask) @ value``, in bits that depend on the row alone.

    A row's bits are a function of its query and of the keys and values it may see, in their order: not of the other
    rows, of keys that it may not see, of padding on either side, or of how the keys are stored. Query head ``h`` reads
    the key head ``h // (heads / key heads)``. A row that may see no key is zero.

    Parameters
    ----------
    query : Tensor
        Shape ``(batch, heads, queries, size)``; float32, float16 or bfloat16.
    key, value : Tensor
        Shape ``(batch, key heads, keys, size)`` and ``(batch, key heads, keys, value size)``; any strides.
    mask : Tensor or None
        Broadcasts to ``(batch, heads, queries, keys)``. Bool: True may be seen. Floating point: added to the scores,
        and ``-inf`` hides a key.
    causal : bool
        Query ``i`` stands at position ``query_offset + i`` and sees the keys up to that position.
    scale : float or None
        None is ``size ** -0.5``.
    window : int or None
        A query sees no key before its last `window` positions, its own included.
    soft_cap : float or None
        ``cap(s) = soft_cap * tanh(s / soft_cap)``.
    sinks : Tensor or None
        Shape ``(heads,)``: one more logit in each row's softmax, without a value.
    query_offset : int or None
        None puts the last query at the last key, as in a cache. (`scaled_dot_product_attention` puts the first query at
        the first key: 0.)
    key_begin, key_end : Tensor or None
        Shape ``(batch,)``, int32 or int64: sequence `b` sees only the keys from ``key_begin[b]`` on, and those before
        ``key_end[b]``. With padding on the left, give its length as `key_begin`: the sequence's position 0 is there, so
        that it has the bits of the call without padding on every device. (A mask says what is hidden, not where the
        sequence begins.) A negative one means that so many keys of the sequence are no longer stored, as in the cache
        of a window; nobody sees them.
    return_logsumexp : bool
        Also return the logarithm of each row's sum of exponentials.

    Returns
    -------
    Tensor or tuple of Tensor
        Shape ``(batch, heads, queries, value size)``, in memory ``(batch, queries, heads, value size)``; and the
        float32 logarithms, ``(batch, heads, queries)``.

    Raises
    ------
    RuntimeError
        Shapes, dtypes or devices that do not fit together, a window below 1, a soft cap that is not positive.

    Examples
    --------
    >>> q = torch.ones(1, 2, 1, 4, device="quartz")
    >>> k = torch.ones(1, 1, 3, 4, device="quartz")
    >>> v = torch.tensor([1.0, 2.0, 6.0], device="quartz").view(1, 1, 3, 1)
    >>> torch_quartz.ops.attention(q, k, v).flatten().cpu()
    tensor([3., 3.])
    """
    output, logsumexp = torch.ops.quartz.attention(
        query, key, value, mask, causal, scale, window, soft_cap, sinks, query_offset, key_begin, key_end
    )
    return (output, logsumexp) if return_logsumexp else output


@torch.library.register_fake("quartz::attention")
def _(
    query,
    key,
    value,
    mask=None,
    causal=False,
    scale=None,
    window=None,
    soft_cap=None,
    sinks=None,
    query_offset=None,
    key_begin=None,
    key_end=None,
):
    batch, heads, queries, _ = query.shape
    output = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
    return output, query.new_empty(batch, heads, queries, dtype=torch.float32)


def _visible(queries: int, keys: int, causal: bool, window: int | None, offset: int, device) -> Tensor | None:
    if not causal and window is None:
        return None
    position = torch.arange(queries, device=device).unsqueeze(1) + offset
    key = torch.arange(keys, device=device)
    visible = key <= position if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    return visible & (key > position - window) if window is not None else visible


def _setup(ctx, inputs, output):
    query, key, value, mask, ctx.causal, ctx.scale, ctx.window, ctx.soft_cap, sinks, ctx.query_offset, *bounds = inputs
    ctx.save_for_backward(query, key, value, mask, sinks, *bounds, *output)


def _backward(ctx, grad, grad_logsumexp):
    # P = exp(S - logsumexp);  dV = P^T dO;  dS = P (dO V^T - rowsum(dO O) + dlogsumexp);  unseen keys: P = 0.
    query, key, value, mask, sinks, key_begin, key_end, output, logsumexp = ctx.saved_tensors
    needed = (*ctx.needs_input_grad, *(False,) * 12)  # arguments left at their default are not counted
    batch, heads, queries, size = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    scale = size**-0.5 if ctx.scale is None else ctx.scale
    grouped = (batch, kv_heads, heads // kv_heads, queries, -1)
    q, grad, out = query.float().reshape(grouped), grad.float().reshape(grouped), output.float().reshape(grouped)
    k, v = key.float().unsqueeze(2), value.float().unsqueeze(2)
    scores = (q * scale) @ k.transpose(-1, -2)
    slope = None
    if ctx.soft_cap is not None:
        bend = torch.tanh(scores / ctx.soft_cap)
        scores, slope = ctx.soft_cap * bend, 1 - bend.square()
    whole = (batch, heads, queries, keys)
    if mask is not None:
        wide = mask.broadcast_to(whole).reshape(scores.shape)
        scores = scores.masked_fill(~wide, -torch.inf) if mask.dtype == torch.bool else scores + wide
    offset = keys - queries if ctx.query_offset is None else ctx.query_offset
    visible = _visible(queries, keys, ctx.causal, ctx.window, offset, query.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    place = torch.arange(keys, device=query.device)
    if key_begin is not None:
        scores = scores.masked_fill(place < key_begin.view(-1, 1, 1, 1, 1), -torch.inf)
    if key_end is not None:
        scores = scores.masked_fill(place >= key_end.view(-1, 1, 1, 1, 1), -torch.inf)
    logsumexp = logsumexp.reshape(grouped)
    hidden = (scores == -torch.inf) | (logsumexp == -torch.inf)
    p = torch.exp(scores - logsumexp).masked_fill(hidden, 0)
    delta = (grad * out).sum(-1, keepdim=True)
    if grad_logsumexp is not None:
        delta = delta - grad_logsumexp.reshape(grouped)
    grad_scores = (p * (grad @ v.transpose(-1, -2) - delta)).masked_fill(hidden, 0)
    grad_mask = grad_sinks = None
    if needed[3]:
        grad_mask = grad_scores.reshape(whole).sum_to_size(mask.shape).to(mask.dtype)
    if needed[8]:
        weight = torch.exp(sinks.float().view(1, kv_heads, -1, 1, 1) - logsumexp)
        grad_sinks = -(weight * delta).sum((0, 3, 4)).reshape(heads).to(sinks.dtype)
    if slope is not None:
        grad_scores = grad_scores * slope
    grad_q = (grad_scores @ k * scale).reshape(query.shape).to(query.dtype)
    grad_k = (grad_scores.transpose(-1, -2) @ (q * scale)).sum(2).to(key.dtype)
    grad_v = (p.transpose(-1, -2) @ grad).sum(2).to(value.dtype)
    return grad_q, grad_k, grad_v, grad_mask, None, None, None, None, grad_sinks, None, None, None


torch.library.register_autograd("quartz::attention", _backward, setup_context=_setup)
