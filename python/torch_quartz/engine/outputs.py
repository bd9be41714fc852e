"""What a request gets back, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch_quartz.engine.metrics import RequestMetrics


class Logprob(NamedTuple):
    """The log probability of a token at one place.

    Examples
    --------
    >>> Logprob(-0.5, rank=1, decoded_token=" Paris")
    Logprob(logprob=-0.5, rank=1, decoded_token=' Paris')
    """

    logprob: float
    rank: int | None = None  # 1 for the most likely; None where the token is not among those asked for
    decoded_token: str | None = None  # None without a tokenizer


@dataclass
class CompletionOutput:
    """One sample of a request.

    Attributes
    ----------
    index : int
        Of the sample, 0 to n - 1.
    text : str
        The text of the tokens; without a tokenizer empty.
    token_ids : list of int
        The tokens, with the one that ended the sample.
    cumulative_logprob : float or None
        Sum of the tokens' log probabilities, where they were asked for.
    logprobs : list of dict or None
        For each token, the drawn and the most likely ones by token id.
    finish_reason : str or None
        "stop", "length", "abort", "error", or None while the sample goes on.
    stop_reason : int, str or None
        The stop token or text that ended it; None for the model's end token.
    error : str or None
        Why the sample failed, where `finish_reason` is "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the sample has ended."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request and what it has so far.

    Attributes
    ----------
    request_id : str
        As given when the request was added.
    prompt : str or None
        The prompt's text; None where it was given as tokens.
    prompt_token_ids : list of int
        The prompt's tokens.
    outputs : list of CompletionOutput
        The samples, by index.
    finished : bool
        Whether all samples have ended.
    prompt_logprobs : list of dict or None
        For each token of the prompt like `CompletionOutput.logprobs`; None for the first, which nothing precedes.
    metrics : RequestMetrics
        Times and counts.
    num_cached_tokens : int
        Tokens of the prompt that the prefix cache had.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0

    @property
    def error(self) -> str | None:
        """Why the request (or its first failed sample) failed; None where nothing did."""
        return next((sample.error for sample in self.outputs if sample.error is not None), None)
