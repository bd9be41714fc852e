"""What a request may ask for: `SamplingParams`, with the names, meanings and defaults of vLLM."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_quartz.engine.structured_output import StructuredOutputsParams

MAX_LOGPROBS = 256  # the most that `ops.sample` returns a row
_LOGPROBS_MODES = ("raw", "processed")
_MOST_SAMPLES = 65536  # the scheduler's bound (csrc/engine)


class OutputKind(enum.Enum):
    """What each output of a running request holds."""

    CUMULATIVE = "cumulative"  # everything since the beginning
    DELTA = "delta"  # what is new since the last output
    FINAL_ONLY = "final_only"  # one output, when the request has finished


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are drawn, when it ends and what is reported.

    Immutable: one object may serve any number of prompts; `clone` makes a changed copy. Every field is honoured or
    refused with ValueError, either here or, where the model or tokenizer decides, when the request is added.

    Parameters
    ----------
    n : int
        Samples of the prompt. All have the request's seed and differ by their index, so they repeat as a set.
    presence_penalty, frequency_penalty : float
        -2 to 2. Subtracted from the logits of generated tokens: once, and as often as generated.
    repetition_penalty : float
        Above 0. Divides positive and multiplies negative logits of tokens of prompt and output.
    temperature : float
        0 takes the most likely token.
    top_p : float
        Above 0, up to 1: the fewest tokens with this share of the probability.
    top_k : int
        The most likely tokens kept; 0 and -1 keep all.
    min_p : float
        0 to 1: keeps tokens with this share of the most likely one's probability.
    seed : int, optional
        64 bits. Identical requests with one seed get identical outputs. Without it each request draws a seed of its
        own from the engine's, or from the system.
    stop : str or list of str, optional
        Texts that end the output.
    stop_token_ids : list of int, optional
        Tokens that end the output. They stay in `token_ids`, not in `text`.
    bad_words : list of str, optional
        Texts of which the last token is never drawn behind the others.
    include_stop_str_in_output : bool
        Whether `text` keeps the stop text or token.
    ignore_eos : bool
        Whether to go on behind the model's end token.
    max_tokens : int, optional
        The most tokens of a sample; None goes on to the model's length.
    min_tokens : int
        Before so many tokens nothing but a finished grammar ends the output.
    logprobs : int, optional
        Reports for each token its own log probability and those of so many most likely ones (0 to 256).
    prompt_logprobs : int, optional
        The same for the tokens of the prompt, always "raw". Such a request takes nothing from the prefix cache.
    logprobs_mode : str
        "raw": of the model's logits as they are. "processed": of the token drawn, among those left by constraints,
        penalties, temperature and truncation; needs ``logprobs=0``.
    detokenize : bool
        Whether text is made of the tokens.
    skip_special_tokens : bool
        Whether `text` leaves out special tokens.
    logit_bias : dict of int to float, optional
        Added to the logits of tokens.
    allowed_token_ids : list of int, optional
        The only tokens that may be drawn.
    structured_outputs : StructuredOutputsParams or dict, optional
        The grammar that the output obeys.
    output_kind : OutputKind or str
        What the outputs of a running request hold; `LLM.generate` returns finished ones whatever is said here.

    Examples
    --------
    >>> SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=128, stop="###").stop
    ('###',)
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    bad_words: Iterable[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    detokenize: bool = True
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Iterable[int] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    output_kind: OutputKind | str = OutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_length()
        self._check_logprobs()
        self._check_lists()
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, "True or False", getattr(self, name))
        if self.structured_outputs is not None:
            self._set("structured_outputs", _structured(self.structured_outputs))
        try:
            self._set("output_kind", OutputKind(self.output_kind))
        except ValueError:
            _refuse("output_kind", f"one of {[kind.value for kind in OutputKind]}", self.output_kind)
        if not self.detokenize and (self.stop or self.bad_words):
            _refuse("detokenize", "True where stop or bad_words are given", self.detokenize)

    def clone(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature <= 1e-30  # the bound of `ops.sample`

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen for everybody else

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, _MOST_SAMPLES)
        _number("temperature", self.temperature, "at least 0", lambda x: x >= 0)
        _number("top_p", self.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1)
        _number("min_p", self.min_p, "between 0 and 1", lambda x: 0 <= x <= 1)
        _number("presence_penalty", self.presence_penalty, "between -2 and 2", lambda x: -2 <= x <= 2)
        _number("frequency_penalty", self.frequency_penalty, "between -2 and 2", lambda x: -2 <= x <= 2)
        _number("repetition_penalty", self.repetition_penalty, "above 0", lambda x: x > 0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.top_k == -1:
            self._set("top_k", 0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.n > 1 and self.greedy:
            _refuse("n", "1 where temperature is 0, because all samples would be the same", self.n)

    def _check_length(self) -> None:
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                _refuse("min_tokens", f"at most max_tokens, which is {self.max_tokens}", self.min_tokens)

    def _check_logprobs(self) -> None:
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.logprobs_mode not in _LOGPROBS_MODES:
            _refuse("logprobs_mode", f"one of {list(_LOGPROBS_MODES)}", self.logprobs_mode)
        if self.logprobs_mode == "processed" and self.logprobs:
            _refuse("logprobs", "0 where logprobs_mode is 'processed' (only the drawn token's is known)", self.logprobs)

    def _check_lists(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._set("stop", _texts("stop", stop))
        self._set("bad_words", _texts("bad_words", self.bad_words))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            ids = _ids("allowed_token_ids", self.allowed_token_ids)
            self._set("allowed_token_ids", ids or _refuse("allowed_token_ids", "not empty", []))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                _refuse("logit_bias", "a dict of token id to number", self.logit_bias)
            for token, value in self.logit_bias.items():
                _integer("logit_bias", token, 0, 2**31 - 1)
                _number(f"logit_bias[{token}]", value, "a finite number", math.isfinite)
            self._set("logit_bias", dict(self.logit_bias))


def _refuse(name: str, rule: str, value: object) -> Any:
    raise ValueError(f"SamplingParams: {name} must be {rule}, got {value!r}")


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    rule = f"an integer of at least {low}" if high is None else f"an integer between {low} and {high}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        _refuse(name, rule, value)
    if value.__index__() < low or (high is not None and value.__index__() > high):
        _refuse(name, rule, value)


def _number(name: str, value: object, rule: str, holds) -> None:
    try:
        right = not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        right = False
    if not right or not holds(value):
        _refuse(name, rule, value)


def _items(name: str, rule: str, values: Iterable | None) -> tuple:
    try:
        return () if values is None else tuple(values)
    except TypeError:
        return _refuse(name, rule, values)


def _texts(name: str, values: Iterable[str] | None) -> tuple[str, ...]:
    if isinstance(values, str):
        _refuse(name, "a list of texts", values)
    for value in (values := _items(name, "a list of texts", values)):
        if not isinstance(value, str) or not value:
            _refuse(name, "a list of texts, none of them empty", value)
    return values


def _ids(name: str, values: Iterable[int] | None) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)):
        _refuse(name, "a list of token ids", values)
    for value in (values := _items(name, "a list of token ids", values)):
        _integer(name, value, 0, 2**31 - 1)
    return tuple(value.__index__() for value in values)


def _structured(value: Any) -> StructuredOutputsParams:
    from torch_quartz.engine.structured_output import StructuredOutputsParams

    if isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, Mapping):
        try:
            return StructuredOutputsParams(**value)
        except TypeError as error:  # a field that it has not
            raise ValueError(f"SamplingParams: structured_outputs: {error}") from None
    return _refuse("structured_outputs", "a StructuredOutputsParams or a dict of its fields", value)
