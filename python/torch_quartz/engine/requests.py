"""From what a caller gives to a `Request`: tokens, and everything checked that tokenizer, model and length decide."""

from __future__ import annotations

import hashlib
import operator
import secrets
import threading
from collections.abc import Mapping
from typing import Any

from torch_quartz.engine.detokenizer import Detokenizer, TextDecoder
from torch_quartz.engine.sampling_params import OutputKind, SamplingParams
from torch_quartz.engine.sequence import Request, SequenceState

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class RequestFactory:
    """Makes requests; safe to use from several threads.

    Parameters
    ----------
    tokenizer : object or None
        Of Transformers. Without one, prompts are token ids, and what is about text is refused.
    vocab_size : int
        Columns of the logits.
    max_model_len : int
        Tokens of prompt and output together.
    eos_token_ids : tuple of int
        The model's end tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int, eos_token_ids: tuple[int, ...]):
        self.tokenizer = tokenizer
        self.decoder = TextDecoder(tokenizer) if tokenizer is not None else None
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._structured: Any = None
        self._lock = threading.Lock()  # a fast tokenizer cannot be changed (padding, truncation) while it is in use

    def make(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        output_kind: OutputKind | None = None,
    ) -> Request:
        """Return the request.

        Parameters
        ----------
        request_id : str
            The caller's name for it.
        prompt : str, list of int or dict
            Text, token ids, or ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``, the dict optionally with
            ``"cache_salt"``: only requests with the same salt share cached blocks.
        params : SamplingParams, optional
            The defaults if not given.
        priority : int
            Lower ones first.
        output_kind : OutputKind, optional
            In place of `params.output_kind`.

        Raises
        ------
        ValueError
            Names the field, the rule and the value.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"request {request_id}: params must be a SamplingParams, got {type(params).__name__}")
        if not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
            raise ValueError(f"request {request_id}: priority must be an integer of 32 bits, got {priority!r}")
        text, ids, salt = self._read(request_id, prompt)
        self._check_prompt(request_id, ids)
        self._check_tokens(request_id, params)
        room = self._max_model_len - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            raise ValueError(
                f"request {request_id}: min_tokens must be at most the {room} tokens that max_model_len "
                f"{self._max_model_len} leaves behind the prompt, got {params.min_tokens}"
            )
        bad_words = self._bad_words(request_id, params)
        stops = (*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids))
        self._check_something_is_left(request_id, params, bad_words, stops)
        return Request(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=ids,
            params=params,
            max_tokens=max_tokens,
            eos_token_ids=self._eos_token_ids,
            all_stop_token_ids=tuple(dict.fromkeys(stops)),
            bad_words_token_ids=bad_words,
            grammar=self._grammar(request_id, params),
            priority=priority,
            cache_salt=salt,
            output_kind=params.output_kind if output_kind is None else output_kind,
        )

    def start(self, request: Request, key: int, engine_seed: int | None) -> None:
        """Give a request its number, seed and samples.

        Parameters
        ----------
        request : Request
            Of `make`.
        key : int
            The engine's number; with `engine_seed` it decides the seed of a request that has none.
        engine_seed : int or None
            None draws the seed from the system.
        """
        params = request.params
        request.key = key
        request.seed = resolve_seed(params.seed, engine_seed, key)
        request.metrics.num_prompt_tokens = len(request.prompt_token_ids)
        request.sequences = [self._sequence(request, index) for index in range(params.n)]
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None] * len(request.prompt_token_ids)

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        with self._lock:
            return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the tokens of a conversation by the tokenizer's template."""
        with self._lock:
            return list(self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))

    def _sequence(self, request: Request, index: int) -> SequenceState:
        params = request.params
        detokenizer = None
        if self.decoder is not None and params.detokenize:
            detokenizer = Detokenizer(
                self.decoder, params.stop, params.include_stop_str_in_output, params.skip_special_tokens
            )
        return SequenceState(
            key=request.key,
            index=index,
            request=request,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            seed=request.seed,
            detokenizer=detokenizer,
            logprobs=None if params.logprobs is None else [],
            cumulative_logprob=None if params.logprobs is None else 0.0,
        )

    def _read(self, request_id: str, prompt: Any) -> tuple[str | None, list[int], bytes]:
        salt = b""
        if isinstance(prompt, Mapping):
            if unknown := set(prompt) - _PROMPT_KEYS:
                raise ValueError(
                    f"request {request_id}: prompt must have the keys {sorted(_PROMPT_KEYS)} only, "
                    f"got {sorted(map(str, unknown))}"
                )
            given = prompt.get("cache_salt") or ""
            if not isinstance(given, (str, bytes)):
                raise ValueError(f"request {request_id}: cache_salt must be a text, got {given!r}")
            salt = given.encode() if isinstance(given, str) else given
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is None and ids is None:
                raise ValueError(f"request {request_id}: prompt must have 'prompt' or 'prompt_token_ids'")
            if ids is not None:
                return text, self._ids(request_id, ids), salt
            prompt = text
        if not isinstance(prompt, str):
            return None, self._ids(request_id, prompt), salt
        if self.tokenizer is None:
            raise ValueError(
                f"request {request_id}: prompt must be token ids where the engine has no tokenizer, got a text"
            )
        try:
            return prompt, self.tokenize(prompt), salt
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair, for example
            raise ValueError(f"request {request_id}: prompt must be a text that can be encoded: {error}") from error

    @staticmethod
    def _ids(request_id: str, values: Any) -> list[int]:
        try:
            if isinstance(values, (bytes, bytearray)):
                raise TypeError("bytes are numbers, but not those of tokens")
            return [operator.index(value) for value in values]
        except TypeError:
            raise ValueError(
                f"request {request_id}: prompt must be a text or a list of token ids, got {values!r:.80}"
            ) from None

    def _check_prompt(self, request_id: str, ids: list[int]) -> None:
        if not ids:
            raise ValueError(f"request {request_id}: prompt must have at least one token, got none")
        if len(ids) >= self._max_model_len:
            raise ValueError(
                f"request {request_id}: prompt must be shorter than max_model_len, which is {self._max_model_len}, "
                f"so that there is room for a token; got {len(ids)} tokens"
            )
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            wrong = next(token for token in ids if not 0 <= token < self._vocab_size)
            raise ValueError(
                f"request {request_id}: prompt must have token ids between 0 and {self._vocab_size - 1}, got {wrong}"
            )

    def _check_tokens(self, request_id: str, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token >= self._vocab_size:
                    raise ValueError(
                        f"request {request_id}: {name} must be token ids below the vocabulary of {self._vocab_size}, "
                        f"got {token}"
                    )
        needs = [name for name in ("stop", "bad_words", "structured_outputs") if getattr(params, name)]
        if needs and self.tokenizer is None:
            raise ValueError(f"request {request_id}: {needs[0]} must not be given where the engine has no tokenizer")

    def _bad_words(self, request_id: str, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):  # at the beginning of a text, and behind another word
                ids = tuple(self.tokenize(text, add_special_tokens=False)) if text else ()
                if ids:
                    found[ids] = None
        if params.bad_words and not found:
            raise ValueError(f"request {request_id}: bad_words must have a token, got {list(params.bad_words)}")
        return tuple(found)

    def _check_something_is_left(
        self, request_id: str, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...], stops: tuple[int, ...]
    ) -> None:
        if params.allowed_token_ids is None:
            return
        banned = {words[0] for words in bad_words if len(words) == 1}
        left = set(params.allowed_token_ids) - banned
        if not left:
            raise ValueError(f"request {request_id}: allowed_token_ids must have a token that bad_words do not ban")
        if params.min_tokens and not left - set(stops):
            raise ValueError(
                f"request {request_id}: allowed_token_ids must have a token that does not end the output, "
                f"because min_tokens is {params.min_tokens}"
            )

    def _grammar(self, request_id: str, params: SamplingParams) -> Any:
        if params.structured_outputs is None:
            return None
        with self._lock:
            if self._structured is None:
                from torch_quartz.engine.structured_output import StructuredOutputManager

                self._structured = StructuredOutputManager(self.tokenizer, self._vocab_size, self._eos_token_ids)
        try:
            return self._structured.compile(params.structured_outputs)
        except ValueError as error:
            raise ValueError(f"request {request_id}: structured_outputs: {error}") from error


def resolve_seed(seed: int | None, engine_seed: int | None, key: int) -> int:
    """Return the seed of a request as a signed 64-bit number.

    Parameters
    ----------
    seed : int or None
        The request's own.
    engine_seed : int or None
        The engine's, for requests without one.
    key : int
        The number of the request.

    Examples
    --------
    >>> resolve_seed(7, None, 0), resolve_seed(2**64 - 1, None, 0)
    (7, -1)
    >>> resolve_seed(None, 1, 0) == resolve_seed(None, 1, 0) != resolve_seed(None, 1, 1)
    True
    """
    if seed is None and engine_seed is None:
        seed = secrets.randbits(64)
    elif seed is None:
        digest = hashlib.blake2b(f"{engine_seed} {key}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed
