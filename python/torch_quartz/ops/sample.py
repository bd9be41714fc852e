"""Sampling of tokens from logits. Page: docs/ops/sample.md."""

from typing import NamedTuple

import torch
from torch import Tensor


class SampleResult(NamedTuple):
    """What `sample` returns, a tensor each; ``-1`` and ``-inf`` where there is nothing.

    Examples
    --------
    >>> torch_quartz.ops.SampleResult._fields
    ('tokens', 'raw_logprobs', 'logprobs', 'top_ids', 'top_logprobs')
    """

    tokens: Tensor  # (rows,), int64
    raw_logprobs: Tensor  # (rows,), float32: of the token, from the logits as given, at temperature 1
    logprobs: Tensor  # (rows,), float32: of the token, among the tokens that were left, at the row's temperature
    top_ids: Tensor  # (rows, top_n), int64: the most likely tokens of the logits as given
    top_logprobs: Tensor  # (rows, top_n), float32: their raw logprobs


def _per_row(value: Tensor | float | None, logits: Tensor, dtype: torch.dtype) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    return torch.full((logits.shape[0],), value, dtype=dtype, device=logits.device)


def sample(
    logits: Tensor,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    seeds: Tensor | int | None = None,
    positions: Tensor | int | None = None,
    *,
    sample_indices: Tensor | int | None = None,
    bitmask: Tensor | None = None,
    bias_ids: Tensor | None = None,
    bias_values: Tensor | None = None,
    repetition_penalty: Tensor | float | None = None,
    frequency_penalty: Tensor | float | None = None,
    presence_penalty: Tensor | float | None = None,
    counts: Tensor | None = None,
    prompt_mask: Tensor | None = None,
    slots: Tensor | None = None,
    pending: Tensor | None = None,
    logprobs: bool = True,
    top_n: int = 0,
) -> SampleResult:
    """Draw a token for every row of logits: the largest ``z + Gumbel noise`` among the tokens that are left.

    The steps, in this order: bitmask, bias, penalties, temperature, min-p, top-k, top-p, draw. The noise is a function
    of seed, sample index, position and token id, so a row's token depends on nothing but its logits and these; host and
    CUDA draw the same. Whatever is per row may be a tensor of one value a row, or a number for all.

    Parameters
    ----------
    logits : Tensor
        Shape ``(rows, vocabulary)``; float32, float16 or bfloat16. NaN counts as ``-inf``, which is never drawn.
    temperature : Tensor or float, optional
        1 if not given; 0 (and whatever is not above 1e-30) takes the largest logit, of equal ones the lowest id.
    top_k : Tensor or int, optional
        Keep the `top_k` largest; of equal logits the lowest ids. 0 or less: all.
    top_p : Tensor or float, optional
        Keep the fewest, largest, with this share of the probability that top-k and min-p left. 1 or more: all; the
        most likely token always stays.
    min_p : Tensor or float, optional
        Keep tokens with this share of the most likely one's probability. 0 or less: all.
    seeds, positions, sample_indices : Tensor or int, optional
        Of the noise; 64, 32 and 32 bits of them count. `positions` is the absolute position of the token drawn. 0 if
        not given: draws are repeated, not random, unless they differ.
    bitmask : Tensor, optional
        Shape ``(rows, ceil(vocabulary / 32))``, int32: bit ``id % 32`` of word ``id // 32`` is 1 where a token may be
        drawn.
    bias_ids, bias_values : Tensor, optional
        Shape ``(rows, entries)``: added to the logits of the tokens; ids outside the vocabulary (-1) are passed over.
    repetition_penalty, frequency_penalty, presence_penalty : Tensor or float, optional
        As everywhere: divides positive and multiplies negative logits of tokens in prompt or output; is subtracted as
        often as the token was generated; is subtracted if it was.
    counts : Tensor, optional
        Shape ``(rows, vocabulary)``, int32: how often each token was generated (`count_tokens`).
    prompt_mask : Tensor, optional
        Like `bitmask`: the tokens of the prompt (`token_bits`).
    slots : Tensor, optional
        The row of `counts` and `prompt_mask` for each row of `logits`, where they are tables of running requests.
    pending : Tensor, optional
        Shape ``(rows, tokens)``: generated too, beside `counts` (the drafts in front of a row); -1 is passed over.
    logprobs : bool
        Whether to compute `raw_logprobs` and `logprobs`; they have no elements otherwise.
    top_n : int
        How many of the most likely tokens to return, at most 256.

    Returns
    -------
    SampleResult
        Tokens, logprobs and most likely tokens. A row in which nothing is left has token -1 and logprobs ``-inf``.

    Raises
    ------
    RuntimeError
        Other dtypes or shapes, tensors on different devices.

    Examples
    --------
    >>> logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 3.0]], device="quartz")
    >>> torch_quartz.ops.sample(logits, temperature=0.0).tokens.cpu()
    tensor([1, 0])
    >>> torch_quartz.ops.sample(logits, top_k=2, seeds=7, positions=torch.tensor([4, 5], device="quartz")).tokens.shape
    torch.Size([2])
    """
    return SampleResult(
        *torch.ops.quartz.sample(
            logits,
            _per_row(temperature, logits, torch.float32),
            _per_row(top_k, logits, torch.int64),
            _per_row(top_p, logits, torch.float32),
            _per_row(min_p, logits, torch.float32),
            _per_row(seeds, logits, torch.int64),
            _per_row(positions, logits, torch.int64),
            _per_row(sample_indices, logits, torch.int64),
            bitmask,
            bias_ids,
            bias_values,
            _per_row(repetition_penalty, logits, torch.float32),
            _per_row(frequency_penalty, logits, torch.float32),
            _per_row(presence_penalty, logits, torch.float32),
            counts,
            prompt_mask,
            slots,
            pending,
            logprobs,
            top_n,
        )
    )


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log probability of one given token a row, in the bits of `raw_logprobs` of `sample`.

    For scoring a finished text so that it equals what was reported while it was generated. A trainer may differentiate
    it: the gradient of the logits is ``grad * (one-hot(token) - softmax(logits))``, in float32, rounded once.

    Parameters
    ----------
    logits : Tensor
        Shape ``(rows, vocabulary)``; float32, float16 or bfloat16.
    tokens : Tensor
        Shape ``(rows,)``, integers.

    Returns
    -------
    Tensor
        Shape ``(rows,)``, float32; ``-inf`` for a token of logit ``-inf`` or NaN, or outside the vocabulary.

    Raises
    ------
    RuntimeError
        As `sample`.

    Examples
    --------
    >>> logits = torch.zeros(2, 4, device="quartz")
    >>> torch_quartz.ops.token_logprobs(logits, torch.tensor([3, 4], device="quartz")).cpu()
    tensor([-1.3863,    -inf])
    """
    return _TokenLogprobs.apply(logits, tokens)


def score_tokens(logits: Tensor, tokens: Tensor, top_n: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `token_logprobs` returns, without a gradient, and the `top_n` most likely tokens as `sample` does.

    Parameters
    ----------
    logits, tokens
        As for `token_logprobs`.
    top_n : int
        As for `sample`.

    Returns
    -------
    tuple of Tensor
        Logprobs ``(rows,)``, ids and logprobs ``(rows, top_n)``.
    """
    # A bias of infinity makes the token the largest; raw logprobs do not see it. Where its logit is -inf, which cannot
    # be raised, another token was taken.
    raised = torch.full((logits.shape[0], 1), torch.inf, device=logits.device)
    result = sample(logits, temperature=0.0, bias_ids=tokens[:, None], bias_values=raised, top_n=top_n)
    scores = torch.where(result.tokens == tokens, result.raw_logprobs, -torch.inf)
    return scores, result.top_ids, result.top_logprobs


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens):
        ctx.save_for_backward(logits, tokens)
        return score_tokens(logits, tokens)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        logits, tokens = ctx.saved_tensors
        vocabulary = logits.shape[1]
        there = (tokens >= 0) & (tokens < vocabulary)
        known = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
        row = torch.softmax(known, -1).neg_()
        row.scatter_add_(1, torch.where(there, tokens, 0).long()[:, None], there.float()[:, None])
        return (row * torch.where(there, grad, 0)[:, None]).to(logits.dtype), None


def count_tokens(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return how often each token occurs in each row: `counts` of `sample` from the tokens of the requests.

    Parameters
    ----------
    tokens : Tensor
        Shape ``(rows, length)``, integers; what is outside the vocabulary (-1 as padding) is passed over.
    vocabulary : int
        The number of tokens.

    Returns
    -------
    Tensor
        Shape ``(rows, vocabulary)``, int32.

    Examples
    --------
    >>> torch_quartz.ops.count_tokens(torch.tensor([[1, 1, 3], [0, -1, -1]], device="quartz"), 4).cpu().tolist()
    [[0, 2, 0, 1], [1, 0, 0, 0]]
    """
    counted = (tokens >= 0) & (tokens < vocabulary)
    counts = torch.zeros(tokens.shape[0], vocabulary, dtype=torch.int32, device=tokens.device)
    return counts.scatter_add_(1, torch.where(counted, tokens, 0).long(), counted.int())


def token_bits(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return which tokens occur in each row as bits: `prompt_mask` (or `bitmask`) of `sample`.

    Parameters
    ----------
    tokens : Tensor
        Shape ``(rows, length)``, integers; what is outside the vocabulary (-1 as padding) is passed over.
    vocabulary : int
        The number of tokens.

    Returns
    -------
    Tensor
        Shape ``(rows, ceil(vocabulary / 32))``, int32: bit ``id % 32`` of word ``id // 32``.

    Examples
    --------
    >>> torch_quartz.ops.token_bits(torch.tensor([[1, 1, 3], [0, -1, -1]], device="quartz"), 40).cpu().tolist()
    [[10, 0], [1, 0]]
    """
    words = (vocabulary + 31) // 32
    there = (count_tokens(tokens, vocabulary) > 0).long()
    there = torch.nn.functional.pad(there, (0, words * 32 - vocabulary)).view(-1, words, 32)
    return (there << torch.arange(32, device=tokens.device)).sum(-1).to(torch.int32)


@torch.library.register_fake("quartz::sample")
def _(
    logits,
    temperature=None,
    top_k=None,
    top_p=None,
    min_p=None,
    seeds=None,
    positions=None,
    sample_indices=None,
    bitmask=None,
    bias_ids=None,
    bias_values=None,
    repetition_penalty=None,
    frequency_penalty=None,
    presence_penalty=None,
    counts=None,
    prompt_mask=None,
    slots=None,
    pending=None,
    logprobs=True,
    top_n=0,
):
    rows = logits.shape[0]
    tokens = logits.new_empty((rows,), dtype=torch.int64)
    numbers = logits.new_empty((rows if logprobs else 0,), dtype=torch.float32)
    ids = logits.new_empty((rows, top_n), dtype=torch.int64)
    return tokens, numbers, torch.empty_like(numbers), ids, ids.new_empty(ids.shape, dtype=torch.float32)
