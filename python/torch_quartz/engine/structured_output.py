"""Grammars that outputs obey, compiled, and the matchers of samples. Page: docs/structured_output.md.

llguidance does the parsing. What this file adds: parameters checked in one place, tokenizers, a cache, and limits, so
that no grammar takes the process down or keeps it busy.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from typing import Any

import torch

from torch_quartz.engine.grammar_source import StructuredOutputsParams, grammar_source

__all__ = ["Grammar", "GrammarMatcher", "StructuredOutputManager", "StructuredOutputsParams"]

# Grammars kept. A large one holds a few MB of lexer states.
_CACHE_SIZE = 128
# llguidance recurses along chains of rules, 2 to 5 KB of stack each, and the process ends where the stack does. Rules
# are bounded by `grammar_source.MAX_RULES`; 1 GiB of addresses (not memory: only touched pages count) holds them all.
_STACK_BYTES = 2**30
# Fuel of llguidance for a grammar's regular expressions, in place of 1,000,000: nested repetitions that use it all up
# take 0.3 s for it and their first mask, not 2 s.
_LEXER_FUEL = 250_000
_MESSAGE_LINES, _MESSAGE_WIDTH = 12, 200


class StructuredOutputManager:
    """Compiles grammars for one tokenizer; safe to use from several threads.

    Parameters
    ----------
    tokenizer : object
        A fast tokenizer of Transformers.
    vocab_size : int
        Columns of the logits, at least the tokens of the tokenizer.
    eos_token_ids : tuple of int
        Tokens that may end an output, beside the tokenizer's own end token.

    Raises
    ------
    ValueError
        No tokenizer, or one whose tokens llguidance cannot read.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...] = ()):
        self._tokenizer = _read_tokenizer(tokenizer, vocab_size, eos_token_ids)
        self._special = _special_tokens(tokenizer)
        self._cache: OrderedDict[bytes, Grammar | str] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar, from the cache where it has been compiled before.

        Parameters
        ----------
        params : StructuredOutputsParams
            What was asked for.

        Raises
        ------
        ValueError
            With the compiler's message; the second time from the cache as well.
        """
        source = grammar_source(params, self._special)
        key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
        if found is None:
            found = _on_a_deep_stack(lambda: _compile(self._tokenizer, source))
            with self._lock:
                self._cache[key] = found
                while len(self._cache) > _CACHE_SIZE:
                    self._cache.popitem(last=False)
        if isinstance(found, str):
            raise ValueError(found)
        return found


class Grammar:
    """A compiled grammar, as `StructuredOutputManager.compile` returns it."""

    def __init__(self, pristine: Any, vocab_size: int):
        self._pristine = pristine  # never advanced: matchers are copies of it
        self._vocab_size = vocab_size

    def matcher(self) -> GrammarMatcher:
        """Return the state of a new sample."""
        return GrammarMatcher(self._pristine.deep_copy(), self._vocab_size)


class GrammarMatcher:
    """How far one sample has come in its grammar.

    It knows tokens alone, so that it stays good while a sample is preempted and resumed.
    """

    def __init__(self, state: Any, vocab_size: int):
        self._state = state
        self._vocab_size = vocab_size

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end can follow, or the end token has been taken."""
        return self._state.is_stopped() and not self._state.is_error()

    @property
    def is_accepting(self) -> bool:
        """Whether the output so far is complete."""
        return self._state.is_accepting()

    def accept(self, tokens: list[int]) -> None:
        """Go on behind tokens.

        Parameters
        ----------
        tokens : list of int
            Drawn ones.

        Raises
        ------
        ValueError
            The grammar does not allow one of them. The state is where it was.
        """
        taken = self._state.try_consume_tokens(self._known(tokens))
        self._check()
        if taken < len(tokens):
            self.rollback(taken)
            raise ValueError(f"the grammar does not allow token {tokens[taken]} (number {taken} of those given)")

    def rollback(self, count: int) -> None:
        """Take back the last tokens.

        Parameters
        ----------
        count : int
            How many of those accepted.

        Raises
        ------
        ValueError
            More than were accepted.
        """
        if count and not self._state.rollback(count):
            raise ValueError(f"cannot take back {count} tokens: {_shorten(self._state.get_error())}")

    def fill(self, row: torch.Tensor) -> None:
        """Write which tokens may come next.

        Parameters
        ----------
        row : Tensor
            ``(ceil(vocabulary / 32),)``, int32, contiguous, on the host: bit ``id % 32`` of word ``id // 32``.

        Raises
        ------
        RuntimeError
            The grammar has become too complex to follow, or no token of the vocabulary can go on with it.
        """
        _check_rows(row, 1)
        self._state.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * 4)
        self._check()

    def fill_drafts(self, rows: torch.Tensor, drafts: list[int]) -> int:
        """Write which tokens may come next, and behind each draft in turn.

        A draft that is not allowed has a 0 in the row before it, so that verification never accepts it; it is not fed
        to the grammar, and rows behind it (and behind the grammar's end) stay as they were. The state does not change.

        Parameters
        ----------
        rows : Tensor
            ``(1 + drafts or more, ceil(vocabulary / 32))``, int32, contiguous, on the host.
        drafts : list of int
            Proposed tokens.

        Returns
        -------
        int
            How many drafts from the first on are allowed.
        """
        [error] = self.fill_batch(rows, [(self, 0, drafts)])
        if error is not None:
            raise error
        return self._state.validate_tokens(self._known(drafts))

    @staticmethod
    def fill_batch(mask: torch.Tensor, entries: list[tuple[GrammarMatcher, int, list[int]]]) -> list[Exception | None]:
        """Write the rows of many matchers, on several threads.

        Parameters
        ----------
        mask : Tensor
            ``(rows, ceil(vocabulary / 32))``, int32, contiguous, on the host. Other rows stay as they are.
        entries : list of tuple
            Matcher, its first row, its drafts (which may be none). No matcher twice.

        Returns
        -------
        list of Exception or None
            For each entry, what went wrong.
        """
        _check_rows(mask, 2)
        rows, words = mask.shape
        for _, first, drafts in entries:
            if first < 0 or first + len(drafts) >= rows:
                raise ValueError(f"fill_batch: rows {first} to {first + len(drafts)} must be rows of the mask's {rows}")
        known = [(matcher._state, first, matcher._known(drafts)) for matcher, first, drafts in entries]
        plain = [(state, first) for state, first, drafts in known if not drafts]
        drafted = [entry for entry in known if entry[2]]
        if plain:
            _executor().unsafe_compute_mask_ptr(plain, mask.data_ptr(), words * 4, rows)
        if drafted:
            _executor().unsafe_compute_mask_ptr_with_draft_token(drafted, mask.data_ptr(), words * 4, rows)
        return [matcher._error() for matcher, _, _ in entries]

    def _known(self, tokens: list[int]) -> list[int]:
        """Return the tokens before the first that is no number of a token: such numbers break the state for good."""
        bad = next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size), len(tokens))
        return tokens[:bad]

    def _error(self) -> Exception | None:
        if self._state.is_error():
            return RuntimeError(f"grammar: {_shorten(self._state.get_error())}")
        return None

    def _check(self) -> None:
        error = self._error()
        if error is not None:
            raise error


def _check_rows(rows: torch.Tensor, dimensions: int) -> None:
    if rows.dtype != torch.int32 or rows.dim() != dimensions or not rows.is_contiguous() or rows.device.type != "cpu":
        raise ValueError(
            f"grammar masks must be contiguous int32 of {dimensions} dimensions on the host, "
            f"got {rows.dtype}, shape {tuple(rows.shape)}, {rows.device}"
        )


_executors: list[Any] = []
_executors_lock = threading.Lock()


def _executor() -> Any:
    """Return llguidance's threads, one set for the process."""
    with _executors_lock:
        if not _executors:
            import llguidance

            _executors.append(llguidance.LLExecutor())
        return _executors[0]


def _read_tokenizer(tokenizer: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Any:
    if tokenizer is None:
        raise ValueError("structured_outputs: the engine has no tokenizer, so that no grammar about text can be obeyed")
    try:
        import llguidance.hf
    except ImportError as error:
        raise ValueError("structured_outputs: needs the package llguidance") from error
    name = type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"structured_outputs: the tokenizer must be a fast one of Transformers, got {name}")
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"structured_outputs: the tokenizer must have no more tokens than the model's {vocab_size} logits, "
            f"got {len(tokenizer)}"
        )
    own = tokenizer.eos_token_id
    ends = list(dict.fromkeys([*([own] if own is not None else []), *eos_token_ids]))
    if not ends:
        raise ValueError(f"structured_outputs: the tokenizer must have an end token, got none in {name}")
    try:
        return llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)
    except Exception as error:
        raise ValueError(f"structured_outputs: llguidance cannot read the tokens of {name}: {error}") from error


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    added = tokenizer.added_tokens_decoder
    return {token.content: number for number, token in added.items() if token.special}


def _compile(tokenizer: Any, source: str) -> Grammar | str:
    """Return the grammar, or what is wrong with it."""
    import llguidance

    limits = llguidance.LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if not matcher.is_error():
        # The first mask shows what the compiler leaves to later: grammars without any text, and lexers that explode.
        mask = matcher.compute_bitmask()
        if matcher.get_error().startswith("NoExtension") or not (matcher.is_error() or any(mask)):
            return "no text obeys it (does something need itself without an end?)"
    if matcher.is_error():
        return _shorten(matcher.get_error())
    return Grammar(matcher, tokenizer.vocab_size)


def _on_a_deep_stack(work: Any) -> Any:
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    with _executors_lock:  # the size is the process's: hold it only while the thread starts
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="quartz-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _shorten(message: str) -> str:
    """Return a message of llguidance without the state and the grammar that it repeats in full."""
    lines = re.split("<state>|<non-verbose/>|<backtrace>", message)[0].strip().splitlines()
    lines = [line if len(line) <= _MESSAGE_WIDTH else line[:_MESSAGE_WIDTH] + " ..." for line in lines if line.strip()]
    if len(lines) > _MESSAGE_LINES:
        lines = [*lines[: _MESSAGE_LINES // 2], "...", *lines[-_MESSAGE_LINES // 2 :]]
    return "\n".join(lines)
