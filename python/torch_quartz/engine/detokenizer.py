"""Text from tokens as they come: the pieces, joined, are exactly the decoding of all tokens; stop texts are found.

A token is not always a text: a character may be spread over several, and decoders treat the first token of a text in
their own way (the space in front of a word). So the latest tokens are decoded together, as a *window*, and only what no
later token can change is given out: a replacement sign at the end may be the beginning of a character, and the tokens
of single bytes ``<0x..>`` stand for what they stand for only when the last of their row is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REPLACEMENT = "\ufffd"
_WINDOW = 16  # tokens; a longer window is cut to the shortest end of it that decodes to the end of its text
_CONTEXT = 4  # tokens that stay at least: the next one is decoded behind them


class TextDecoder:
    """A tokenizer as a function of token ids, shared by all requests.

    Parameters
    ----------
    tokenizer : object
        Of Transformers. Texts are ``tokenizer.decode(ids, clean_up_tokenization_spaces=False)``: cleaning would change
        what has been given out.
    """

    def __init__(self, tokenizer: Any):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        if backend is not None:
            self._decode: Callable[[list[int], bool], str] = backend.decode
            found = [backend.token_to_id(name) for name in names]
        else:
            self._decode = lambda ids, skip: tokenizer.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            vocabulary = tokenizer.get_vocab()
            found = [vocabulary.get(name) for name in names]
        self.byte_ids = frozenset(token for token in found if token is not None)
        self._words: dict[int, str] = {}

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return self._decode(ids, skip_special_tokens)

    def word(self, token: int) -> str:
        """Return the text of one token alone, for reports."""
        if token not in self._words:
            self._words[token] = self._decode([token], False)
        return self._words[token]


class TextStream:
    """The text of a growing list of tokens, in pieces that never change.

    Examples
    --------
    >>> stream = TextStream(TextDecoder(tokenizer))
    >>> "".join(map(stream.add, ids)) + stream.flush() == tokenizer.decode(ids)
    True
    """

    def __init__(self, decoder: TextDecoder, skip_special_tokens: bool = True):
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were given out
        self._in_bytes = False  # whether the text ends with a row of byte tokens, which the next one may continue

    def add(self, token: int) -> str:
        """Take one token and return the text that is certain now."""
        self._window.append(token)
        if token in self._decoder.byte_ids:
            self._in_bytes = True
            return ""
        if self._in_bytes and not self._decoder.decode([token], self._skip):
            return ""  # what leaves no text does not end the row
        self._in_bytes = False
        text = self._decoder.decode(self._window, self._skip)
        certain = len(text) - text.endswith(REPLACEMENT)
        piece = text[self._given : certain]
        self._given = max(self._given, certain)
        if certain == len(text) and len(self._window) >= _WINDOW:
            self._shorten(text)
        return piece

    def flush(self) -> str:
        """Return what was held back, at the end."""
        text = self._decoder.decode(self._window, self._skip)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _shorten(self, text: str) -> None:
        for start in range(len(self._window) - _CONTEXT, 0, -1):
            rest = self._window[start:]
            if rest[0] in self._decoder.byte_ids or self._window[start - 1] in self._decoder.byte_ids:
                continue  # inside a row of bytes
            end = self._decoder.decode(rest, self._skip)
            # Nothing (special tokens only) is no context; a sign in front is the rest of a character cut in two.
            if end and not end.startswith(REPLACEMENT) and text.endswith(end):
                self._window, self._given = rest, len(end)
                return


class Detokenizer:
    """The text of a sample, and the search for stop texts in it.

    Parameters
    ----------
    decoder : TextDecoder
        Of the tokenizer.
    stop : tuple of str
        Texts that end the sample: the first to be complete; of several complete with the same token, the one that
        begins first, and of those the first in this list.
    include_stop : bool
        Whether the text keeps the stop text.
    skip_special_tokens : bool
        Whether special tokens leave no text.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self._stream = TextStream(decoder, skip_special_tokens)
        self._stop = stop
        self._include_stop = include_stop
        self._longest = max(map(len, stop), default=0)
        self._text = ""
        self._taken = 0  # characters that `take` has returned
        self._ended = False

    def add(self, token: int, search: bool = True) -> str | None:
        """Take one token; return the stop text that it completes, if any."""
        return self._append(self._stream.add(token), search)

    def finish(self, search: bool = True) -> str | None:
        """Take the end of the tokens; return the stop text in what had been held back, if any."""
        if self._ended:
            return None
        found = self._append(self._stream.flush(), search)
        self._ended = True
        return found

    def text(self, finished: bool = False) -> str:
        """Return the text so far, without an end that may turn out to be the beginning of a stop text."""
        return self._text if finished or self._ended else self._text[: self._visible()]

    def take(self) -> str:
        """Return what `text` has gained since the last call."""
        end = len(self._text) if self._ended else self._visible()
        piece = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return piece

    def _append(self, piece: str, search: bool) -> str | None:
        before = len(self._text)
        self._text += piece
        if not piece or not search or not self._stop:
            return None
        first = max(0, before - self._longest + 1)
        found = [(at, stop) for stop in self._stop if (at := self._find(stop, first, before)) >= 0]
        if not found:
            return None
        at, stop = min(found, key=lambda pair: pair[0])
        self._text = self._text[: at + len(stop) if self._include_stop else at]
        self._ended = True
        return stop

    def _find(self, stop: str, first: int, before: int) -> int:
        # Only what ends in the new piece counts: the text in front of it was searched, or was not to be.
        return self._text.find(stop, max(first, before - len(stop) + 1))

    def _visible(self) -> int:
        text = self._text
        if self._include_stop or not self._stop:
            return len(text)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stop):
                return len(text) - length
        return len(text)
