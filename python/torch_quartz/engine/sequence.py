"""A request and its samples while the engine serves them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch_quartz.engine.detokenizer import Detokenizer
from torch_quartz.engine.metrics import RequestMetrics
from torch_quartz.engine.outputs import CompletionOutput, Logprob, RequestOutput
from torch_quartz.engine.sampling_params import OutputKind, SamplingParams


@dataclass(eq=False)
class Request:
    """A prompt with its parameters, checked, and everything that the tokenizer and the model decide about it.

    Attributes
    ----------
    request_id : str
        The caller's name for it.
    prompt : str or None
        Its text, where given.
    prompt_token_ids : list of int
        Its tokens.
    params : SamplingParams
        What was asked for.
    max_tokens : int
        The most tokens of a sample, with the model's length in mind.
    eos_token_ids : tuple of int
        The model's end tokens, also where they are ignored.
    all_stop_token_ids : tuple of int
        Tokens that end a sample: `params.stop_token_ids` and, unless ignored, `eos_token_ids`. None of them may be
        drawn before `params.min_tokens`.
    bad_words_token_ids : tuple of tuple of int
        Token sequences of `params.bad_words`: the last token of one may not be drawn behind the others.
    grammar : object or None
        The compiled `params.structured_outputs`.
    priority : int
        Lower ones first, under the "priority" policy.
    cache_salt : bytes
        Requests share cached blocks only with requests of the same salt.
    output_kind : OutputKind
        What outputs hold.
    key : int
        The engine's number for it.
    seed : int
        The seed of all samples, as a signed 64-bit number.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int = 1
    eos_token_ids: tuple[int, ...] = ()
    all_stop_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Any = None
    priority: int = 0
    cache_salt: bytes = b""
    output_kind: OutputKind = OutputKind.CUMULATIVE
    key: int = -1
    seed: int = 0
    sequences: list[SequenceState] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def finished(self) -> bool:
        """Whether all samples have ended."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(sequence.num_output_tokens for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """Return what the caller gets now, and take it as given (of a "delta" request only the news are returned)."""
        delta = self.output_kind is OutputKind.DELTA
        samples = [sequence.output(delta) for sequence in self.sequences if not delta or sequence.has_news()]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=samples,
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            metrics=self.metrics,
            num_cached_tokens=self.metrics.num_cached_tokens,
        )


@dataclass(eq=False)
class SequenceState:
    """One sample of a request: the tokens that the host knows, and what has been made of them.

    Attributes
    ----------
    key, index : int
        The request's number and the sample's index: its name for scheduler and runner.
    request : Request
        With `.params`.
    token_ids : list of int
        Prompt and output.
    num_prompt_tokens : int
        How many of them are the prompt.
    seed : int
        Signed 64 bits; `index` is the sample index of the noise.
    drafts : list of int
        What the latest finished step proposed for the next one.
    matcher : object or None
        The state of the grammar.
    """

    key: int
    index: int
    request: Request
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int
    detokenizer: Detokenizer | None = None
    matcher: Any = None
    drafts: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    failures: int = 0
    _given_tokens: int = 0  # of what "delta" outputs have said
    _given_finish: bool = False

    @property
    def params(self) -> SamplingParams:
        """What was asked for."""
        return self.request.params

    @property
    def num_output_tokens(self) -> int:
        """Tokens behind the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens behind the prompt."""
        return self.token_ids[self.num_prompt_tokens :]

    def finish(self, reason: str, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """Take the sample as ended; the first reason stays."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
            self.matcher = None

    def has_news(self) -> bool:
        """Whether a "delta" output would say something."""
        return self.num_output_tokens > self._given_tokens or (self.finish_reason is not None) != self._given_finish

    def output(self, delta: bool) -> CompletionOutput:
        """Return the sample for the caller: everything, or what is new since the last call."""
        first = self._given_tokens if delta else 0
        text = ""
        if self.detokenizer is not None:
            text = self.detokenizer.take() if delta else self.detokenizer.text(self.finish_reason is not None)
        self._given_tokens = self.num_output_tokens
        self._given_finish = self.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[self.num_prompt_tokens + first :],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[first:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )
