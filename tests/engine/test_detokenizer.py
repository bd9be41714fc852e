"""Incremental text: joined pieces equal the decoding of all tokens, for every kind of decoder; stop texts."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch_quartz.engine.detokenizer import REPLACEMENT, Detokenizer, TextDecoder, TextStream

TEXTS = (
    "Hello world, it is 12.5 degrees .",
    "안녕하세요 세계! 한국어 문장입니다.",
    "你好,世界。今天天气很好。",
    "family 👨\u200d👩\u200d👧\u200d👦 and flag 🏳\u200d🌈!",
    "naïve café e\u0301 – ½",
    "  leading and  double   spaces \n\n\tand tabs ",
    "",
)


class Fast:
    """What the detokenizer needs of a tokenizer of Transformers: its backend."""

    def __init__(self, backend):
        self.backend_tokenizer = backend

    def decode(self, ids, skip_special_tokens=True):
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens)


class Slow:
    """A tokenizer without a backend."""

    def __init__(self, fast):
        self._fast = fast

    def get_vocab(self):
        return self._fast.backend_tokenizer.get_vocab()

    def decode(self, ids, skip_special_tokens=True, clean_up_tokenization_spaces=True):
        assert not clean_up_tokenization_spaces
        return self._fast.decode(ids, skip_special_tokens)


def byte_level():
    """Every byte a token, some pairs, a special token: GPT-2's kind, Llama 3, Qwen, SmolLM2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {sign: i for i, sign in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Fast(tokenizer)


def sentence_piece(fallback=True):
    """Words with ▁, bytes <0x..> for the rest, the leading space stripped: Llama 2's kind."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁▁▁", *"abcdefghijklmnopqrstuvwxyzHABC,.!好", "▁hello", "▁world", "한"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if fallback:
        steps.insert(1, decoders.ByteFallback())
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return Fast(tokenizer)


def metaspace():
    """As sentence_piece, through one decoder that knows the first token."""
    fast = sentence_piece()
    fast.backend_tokenizer.decoder = decoders.Metaspace()
    return fast


KINDS = {
    "byte level": byte_level,
    "sentence piece": sentence_piece,
    "bytes without the flag": lambda: sentence_piece(fallback=False),
    "metaspace": metaspace,
    "no backend": lambda: Slow(sentence_piece()),
    "no backend, byte level": lambda: Slow(byte_level()),
}


@pytest.fixture(params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def encode(tokenizer, text):
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer._fast.backend_tokenizer
    return backend.encode(text.replace(" ", "▁") if "▁" in backend.get_vocab() else text).ids


def whole(tokenizer, ids, skip=True):
    if isinstance(tokenizer, Slow):
        return tokenizer.decode(ids, skip, clean_up_tokenization_spaces=False)
    return tokenizer.decode(ids, skip)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_of_texts(tokenizer, text):
    ids = encode(tokenizer, text)
    stream = TextStream(TextDecoder(tokenizer))
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) + stream.flush() == whole(tokenizer, ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_of_random_tokens(tokenizer, skip):
    """Whatever a model emits: broken characters, special tokens, byte rows that are no text, ids of no token."""
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer._fast.backend_tokenizer
    chance = random.Random(7)
    decoder = TextDecoder(tokenizer)
    size = backend.get_vocab_size() + 3
    for _ in range(300):
        few = [chance.randrange(size) for _ in range(chance.randint(1, 12))]
        ids = [chance.choice(few) for _ in range(chance.randint(1, 90))]
        stream = TextStream(decoder, skip)
        assert "".join(map(stream.add, ids)) + stream.flush() == whole(tokenizer, ids, skip)


def test_every_prefix_of_a_text_is_certain(tokenizer):
    """What was given out is the beginning of the decoding of any continuation."""
    ids = encode(tokenizer, "".join(TEXTS))
    everything = whole(tokenizer, ids)
    stream, given = TextStream(TextDecoder(tokenizer)), ""
    for token in ids:
        given += stream.add(token)
        assert everything.startswith(given)


def test_text_is_not_held_back_without_need():
    tokenizer = byte_level()
    stream = TextStream(TextDecoder(tokenizer))
    assert [stream.add(token) for token in encode(tokenizer, "hé")] == ["h", "", "é"]


def test_broken_end_is_shown_at_the_end():
    """A cut inside a character by the length limit: a replacement sign, once, and only at the end."""
    tokenizer = byte_level()
    ids = encode(tokenizer, "ok 👍")[:-1]
    stream = TextStream(TextDecoder(tokenizer))
    assert "".join(map(stream.add, ids)) == "ok "
    assert stream.flush() == REPLACEMENT
    assert stream.flush() == ""


def test_long_texts_cost_a_window_a_token():
    tokenizer = byte_level()
    decoder = TextDecoder(tokenizer)
    lengths = []
    decode = decoder.decode
    decoder.decode = lambda ids, skip: lengths.append(len(ids)) or decode(ids, skip)
    stream = TextStream(decoder)
    for token in encode(tokenizer, TEXTS[0] * 50):
        stream.add(token)
    assert max(lengths) <= 16 and len(lengths) < 3 * 50 * len(TEXTS[0])


# ---- stop texts ----


def run(tokenizer, text, stop, include=False, search_from=0):
    """Feed a text; return the stop found, tokens used, final text, and the text shown after each token."""
    detokenizer = Detokenizer(TextDecoder(tokenizer), stop, include)
    ids, shown, taken = encode(tokenizer, text), [], ""
    found = None
    for used, token in enumerate(ids, 1):
        found = detokenizer.add(token, used >= search_from)
        if found:
            break
        shown.append(detokenizer.text())
        taken += detokenizer.take()
        assert taken == shown[-1]
    else:
        found = detokenizer.finish()
    taken += detokenizer.take()
    assert taken == detokenizer.text(True)
    return found, used, taken, shown


@pytest.mark.parametrize("include", [False, True])
def test_stop_text_over_several_tokens(include):
    found, used, text, shown = run(byte_level(), "one STOP two", ("STOP",), include)
    assert (found, used) == ("STOP", 8)
    assert text == ("one STOP" if include else "one ")
    if not include:
        assert all("S" not in part for part in shown)  # a possible beginning is not shown


def test_what_only_looked_like_a_stop_text_is_shown():
    found, _, text, shown = run(byte_level(), "a ST b STO", ("STOP",))
    assert found is None and text == "a ST b STO"
    assert shown[3] == "a " and shown[4] == "a ST "


def test_overlapping_beginnings():
    assert run(byte_level(), "xababac", ("abac",))[::2] == ("abac", "xab")
    assert run(byte_level(), "aaab", ("aab",))[::2] == ("aab", "a")


def test_first_complete_stop_text_wins():
    assert run(byte_level(), "abcd", ("cd", "abc", "b"))[:3] == ("b", 2, "a")
    # Complete with the same token (" w" is one): the one that begins first, then the order of the list.
    assert run(byte_level(), "a wx", ("w", " w"))[::2] == (" w", "a")
    assert run(byte_level(), "a wx", (" w", "w"))[::2] == (" w", "a")


@pytest.mark.parametrize("text", ["안녕END!", "你好END", "👨\u200d👩END"])
def test_stop_text_behind_a_split_character(tokenizer, text):
    found, _, shown_text, _ = run(tokenizer, text, ("END",))
    ids = encode(tokenizer, text)
    expected, stop, _ = whole(tokenizer, ids).partition("END")
    assert (found or "") == stop and shown_text == expected


def test_stop_text_of_a_split_character(tokenizer):
    found, _, text, _ = run(tokenizer, "ab👍cd", ("👍",))
    expected, stop, _ = whole(tokenizer, encode(tokenizer, "ab👍cd")).partition("👍")
    assert (found or "") == stop and text == expected


def test_stop_text_held_back_until_the_end():
    found, _, text, _ = run(sentence_piece(), "ab👍", ("👍",))
    assert (found, text) == ("👍", "ab")


def test_no_search_before_min_tokens():
    assert run(byte_level(), "a.b.c", (".",), search_from=4)[:3] == (".", 4, "a.b")
    assert run(byte_level(), "a.b.c", (".",), search_from=3)[:3] == (".", 4, "a.b")
