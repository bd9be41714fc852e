"""Structured outputs: random walks through the masks against independent checks; drafts; hostile grammars."""

import json
import random
import re
import subprocess
import sys
import threading
import time

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch_quartz.engine.structured_output import GrammarMatcher, StructuredOutputManager, StructuredOutputsParams
from transformers import PreTrainedTokenizerFast

pytest.importorskip("llguidance")

_WORDS = (
    '{"',
    '":',
    '",',
    '"}',
    "true",
    "false",
    "null",
    "12",
    "03",
    "ab",
    "yes",
    " because",
    "é",
    "😀",
    "\\u",
    "\\ud83d",
    "},",
)


def byte_tokenizer():
    """Return a tokenizer of all bytes and some words, with two special tokens at the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(alphabet)}
    merges = []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in _WORDS:
        pieces = list(level.pre_tokenize_str(word)[0][0])
        for end in range(2, len(pieces) + 1):
            if "".join(pieces[:end]) not in vocabulary:
                merges.append(("".join(pieces[: end - 1]), pieces[end - 1]))
                vocabulary["".join(pieces[:end])] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<call>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
VOCABULARY = len(TOKENIZER) + 37  # models have columns of no token
WORDS = (VOCABULARY + 31) // 32
MANAGER = StructuredOutputManager(TOKENIZER, VOCABULARY)


def compiled(**fields):
    return MANAGER.compile(StructuredOutputsParams(**fields))


def new_rows(count=1):
    return torch.full((count, WORDS), -1, dtype=torch.int32)


def allowed(row):
    bits = (row[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return bits.flatten().nonzero().flatten().tolist()


def next_tokens(matcher):
    rows = new_rows()
    matcher.fill(rows[0])
    return allowed(rows[0])


def accepts(text, **fields):
    """Return whether a text obeys a grammar, token by token through the masks."""
    matcher = compiled(**fields).matcher()
    for token in TOKENIZER.encode(text):
        if token not in next_tokens(matcher):
            return False
        matcher.accept([token])
    return matcher.is_accepting


def walk(grammar, seed, most=400, end=0.3):
    """Return what random draws from the masks write, or None where they find no end."""
    chance, matcher, tokens = random.Random(seed), grammar.matcher(), []
    while not matcher.is_finished:
        if len(tokens) == most:
            return None
        choice = next_tokens(matcher)
        assert choice and max(choice) < len(TOKENIZER)
        closing = [t for t in choice if TOKENIZER.decode([t])[:1] in ('"', "}", "]")]
        if EOS in choice and (chance.random() < end or choice == [EOS]):
            matcher.accept([EOS])
            break
        token = chance.choice(closing if closing and chance.random() < end else choice)
        if token == EOS:
            matcher.accept([EOS])
            break
        matcher.accept([token])
        tokens.append(token)
    assert matcher.is_finished
    return TOKENIZER.decode(tokens)


# ---- texts obey ----


def obeys(value, schema, root):
    """Check the keywords that the schemas below use."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for name in schema["$ref"].split("/")[1:]:
            target = target[name]
        return obeys(value, target, root)
    kinds = {
        "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
        "integer": int, "number": (int, float),
    }  # fmt: skip
    kind = schema.get("type")
    if kind is not None:
        names = kind if isinstance(kind, list) else [kind]
        if not any(isinstance(value, kinds[n]) and (n == "boolean" or not isinstance(value, bool)) for n in names):
            return False
    if "enum" in schema and not any(value == v and type(value) is type(v) for v in schema["enum"]):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "anyOf" in schema and not any(obeys(value, s, root) for s in schema["anyOf"]):
        return False
    if not all(obeys(value, s, root) for s in schema.get("allOf", ())):
        return False
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9):
            return False
        return "pattern" not in schema or re.search(schema["pattern"], value) is not None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = schema.get("minimum", -1e300), schema.get("maximum", 1e300)
        above, below = schema.get("exclusiveMinimum", -1e300), schema.get("exclusiveMaximum", 1e300)
        return low <= value <= high and above < value < below and value % schema.get("multipleOf", value or 1) == 0
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        good = all(obeys(v, first[i] if i < len(first) else rest, root) for i, v in enumerate(value))
        return good and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 10**9)
    if isinstance(value, dict):
        for name, entry in value.items():
            own = schema.get("properties", {}).get(name)
            patterns = [s for p, s in schema.get("patternProperties", {}).items() if re.search(p, name)]
            checks = [s for s in (own, *patterns) if s is not None] or [schema.get("additionalProperties", True)]
            if not all(obeys(entry, check, root) for check in checks):
                return False
        count = schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", 10**9)
        return count and all(name in value for name in schema.get("required", ()))
    return True


SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "boolean"}},
     "required": ["a", "b"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": -3, "maximum": 120}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "null"}, {"enum": [1, "x", None]}], "items": False, "minItems": 2},
    {"type": "integer", "multipleOf": 7, "minimum": 10, "exclusiveMaximum": 1000},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "string", "pattern": "^[a-c]+é$", "minLength": 3, "maxLength": 6},
    {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"],
                                  "additionalProperties": False}]},
    {"type": "object", "patternProperties": {"^k": {"type": "integer"}}, "additionalProperties": False,
     "minProperties": 1, "maxProperties": 2},
    {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    {"type": ["string", "null"], "maxLength": 2},
    {"const": {"a": [1, {"b": "é"}]}},
    {"$defs": {"x": {"type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 2}}, "$ref": "#/$defs/x"},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
@pytest.mark.parametrize("options", [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": " ?"}])
def test_random_draws_obey_their_schema(number, options):
    schema = SCHEMAS[number]
    grammar = compiled(json=schema if number % 2 else json.dumps(schema), **options)
    texts = [walk(grammar, seed) for seed in range(25)]
    found = [text for text in texts if text is not None]
    assert len(found) >= 10
    for text in found:
        assert obeys(json.loads(text), schema, schema), text
        text.encode()  # valid Unicode
        if options == {"disable_any_whitespace": True}:
            assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text)), text


@pytest.mark.parametrize(
    "pattern", [r"[0-9]{4}-[01][0-9]", r"(yes|no), because [a-z ]{5,60}\.", r"[^a]é?(😀|b){1,3}", "a*"]
)
def test_random_draws_match_their_expression(pattern):
    grammar = compiled(regex=pattern)
    for seed in range(25):
        text = walk(grammar, seed)
        assert text is not None and re.fullmatch(pattern, text, re.DOTALL), text


def test_choices_are_all_found_and_nothing_else():
    choice = ["yes", "yes because", 'a "quoted"\nline', "é😀", "\\d", ""]
    grammar = compiled(choice=choice)
    assert {walk(grammar, seed) for seed in range(200)} == set(choice)


def test_thousands_of_choices():
    choice = [f"x{i} y" for i in range(9000)]
    assert accepts("x8999 y", choice=choice) and not accepts("x9000 y", choice=choice)
    assert walk(compiled(choice=choice), 1) in choice


def test_json_object_gives_objects():
    found = [walk(compiled(json_object=True), seed) for seed in range(20)]
    assert sum(isinstance(json.loads(text), dict) for text in found if text is not None) >= 10
    assert not accepts("[]", json_object=True)


@pytest.mark.parametrize(
    "grammar",
    ['start: "a" start "b" | ""\n', 'root ::= "a" root "b" | ""\n'],
)
def test_context_free_grammars_in_both_notations(grammar):
    for seed in range(10):
        text = walk(compiled(grammar=grammar), seed)
        assert text is None or text == "a" * (len(text) // 2) + "b" * (len(text) // 2)
    assert accepts("aaabbb", grammar=grammar) and not accepts("aab", grammar=grammar)


def test_structural_tags():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tag = {
        "structures": [
            {"begin": "<f=one>", "schema": schema, "end": "</f>"},
            {"begin": "<f=two>", "schema": {"type": "null"}, "end": "</f>"},
            {"begin": "<call>", "schema": {"type": "boolean"}, "end": ""},
        ],
        "triggers": ["<f=", "<call>"],
    }
    for given in (tag, json.dumps(tag)):
        for text in ("free é text", '<f=one>{"x":1}</f>', 'a <f=two>null</f> b <f=one>{"x": 2}</f>', "<call>true more"):
            assert accepts(text, structural_tag=given), text
        for text in ('<f=one>{"x":"1"}</f>', "<f=three>", "<f=two>nul", "a<call>1"):
            assert not accepts(text, structural_tag=given), text


def test_models_with_a_schema_and_closed_objects():
    class Model:
        @staticmethod
        def model_json_schema():
            return SCHEMAS[0]

    assert accepts('{"a":"x","b":true}', json=Model)
    open_schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    assert accepts('{"c":1}', json=open_schema)
    assert not accepts('{"c":1}', json=open_schema, disable_additional_properties=True)


# ---- parameters ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({"regex": ""}, "regex"),
        ({"choice": []}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"choice": [1]}, "choice"),
        ({"json_object": False}, "json_object"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"json_object": True, "disable_additional_properties": True}, "disable_additional_properties"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
)
def test_parameters_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": "{"}, "JSON schema"),
        ({"json": 3}, "JSON schema"),
        ({"json": {"type": "foo"}}, "foo"),
        ({"json": {"$ref": "#/$defs/none"}}, "none"),
        ({"json": {"$ref": "https://example.org/x"}}, "example.org"),
        ({"json": {"type": "array", "x-guidance": {"lenient": True}, "uniqueItems": True}}, "lenient"),
        ({"regex": "(a"}, "invalid regex|unclosed"),
        ({"regex": r"(?=a)b"}, "look-around|lookahead|look"),
        ({"regex": r"(a)\1"}, "backreference"),
        ({"grammar": "start: b"}, "b"),
        ({"grammar": "start: %json {"}, "%json"),
        ({"structural_tag": {"structures": [], "triggers": ["<"]}}, "structures"),
        ({"structural_tag": {"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["<"]}}, "triggers"),
        ({"structural_tag": {"type": "structural_tag", "format": {}}}, "structures and triggers"),
        ({"json": {"type": "string", "pattern": "a\ud800"}}, "Unicode|surrogate|escape"),
    ],
)
def test_what_does_not_compile_says_why(fields, message):
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ValueError, match=message) as caught:
            compiled(**fields)
        assert len(str(caught.value)) < 4000


@pytest.mark.parametrize(
    ("keyword", "schema", "bad"),
    [
        ("multipleOf", {"type": "integer", "multipleOf": 3}, "4"),
        ("uniqueItems", {"type": "array", "uniqueItems": True}, "[1,1]"),
        ("contains", {"type": "array", "contains": {"const": 7}}, "[1]"),
        ("minContains", {"type": "array", "minContains": 1}, "[]"),
        ("minProperties", {"type": "object", "minProperties": 1}, "{}"),
        ("maxProperties", {"type": "object", "maxProperties": 1}, '{"a":1,"b":2}'),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1}'),
        ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a":1}'),
        ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}, '{"a":1}'),
        ("minimum", {"type": "integer", "minimum": 3}, "2"),
        ("minimum", {"type": "integer", "minimum": 3}, "03"),
        ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": True, "minimum": 3}, "3"),
        ("propertyNames", {"type": "object", "propertyNames": {"pattern": "a"}}, '{"b":1}'),
        ("not", {"not": {"type": "integer"}}, "1"),
        ("if", {"if": {"type": "integer"}, "then": {"minimum": 3}}, "1"),
        ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}, '{"a":1}'),
        ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}, "[1]"),
        ("dynamicRef", {"$dynamicRef": "#"}, "1"),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1"),
        ("format", {"type": "string", "format": "foo"}, '"a"'),
        ("format", {"type": "string", "format": "date"}, '"a"'),
        ("additionalItems", {"items": [{"type": "integer"}], "additionalItems": False, "type": "array"}, "[1,2]"),
    ],
)
def test_keywords_are_honoured_or_named(keyword, schema, bad):
    try:
        assert not accepts(bad, json=schema)
    except ValueError as error:
        assert keyword in str(error)


def test_lengths_count_characters():
    short = {"type": "string", "maxLength": 1}
    assert accepts('"é"', json=short) and accepts('"😀"', json=short) and accepts('"\\ud83d\\ude00"', json=short)
    assert not accepts('"e\u0301"', json=short)
    assert not accepts('"😀"', json={"type": "string", "minLength": 2})
    assert not accepts('"\\ud83d"', json=short)  # half a pair is no character


# ---- tokenizers ----


def fallback_tokenizer(flag):
    pieces = ["<unk>", "<eos>", "<0x0A>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", '"', "a", "▁"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=flag))
    steps = [decoders.Replace("▁", " "), *([decoders.ByteFallback()] if flag else []), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


def test_byte_pieces_are_bytes_where_the_tokenizer_says_so():
    manager = StructuredOutputManager(fallback_tokenizer(True), 10)
    matcher = manager.compile(StructuredOutputsParams(json={"type": "string", "maxLength": 1})).matcher()
    rows = torch.zeros(1, 1, dtype=torch.int32)
    matcher.fill(rows[0])
    assert 6 not in allowed(rows[0])
    matcher.accept([7])  # the quote
    for token, others in ((3, {4}), (4, {5, 6}), (5, {6, 5}), (6, set())):
        matcher.fill(rows[0])
        choice = set(allowed(rows[0]))
        assert token in choice and not (choice & {7} and token != 3)
        if token != 3:
            assert choice <= {4, 5, 6}, others
        matcher.accept([token])
    matcher.fill(rows[0])
    assert allowed(rows[0]) == [7]


def test_byte_pieces_are_letters_without_the_flag():
    try:
        manager = StructuredOutputManager(fallback_tokenizer(False), 10)
    except ValueError as error:
        assert "cannot read the tokens" in str(error)
        return
    matcher = manager.compile(StructuredOutputsParams(json={"type": "string", "maxLength": 6})).matcher()
    rows = torch.zeros(1, 1, dtype=torch.int32)
    matcher.accept([7, 6])
    matcher.fill(rows[0])
    assert allowed(rows[0]) == [7]


def test_tokenizers_that_cannot_serve_are_refused():
    with pytest.raises(ValueError, match="no tokenizer"):
        StructuredOutputManager(None, 10)
    with pytest.raises(ValueError, match="fast"):
        StructuredOutputManager(object(), 10)
    with pytest.raises(ValueError, match="no more tokens"):
        StructuredOutputManager(TOKENIZER, 100)
    bare = Tokenizer(models.WordLevel({"<pad>": 0, "w": 1}, unk_token="<pad>"))
    with pytest.raises(ValueError, match="end token"):
        StructuredOutputManager(PreTrainedTokenizerFast(tokenizer_object=bare, pad_token="<pad>"), 10)
    with pytest.raises(ValueError, match="cannot read the tokens"):
        StructuredOutputManager(PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<pad>"), 10)


def test_all_end_tokens_of_the_model_end():
    call = TOKENIZER.convert_tokens_to_ids("<call>")
    manager = StructuredOutputManager(TOKENIZER, VOCABULARY, (call,))
    matcher = manager.compile(StructuredOutputsParams(regex="a?")).matcher()
    assert {EOS, call} < set(next_tokens(matcher))
    matcher.accept([call])
    assert matcher.is_finished


# ---- drafts, rollback, many at once ----


def expected_rows(matcher, drafts):
    """Return the masks by the plain loop: one at a time, until a draft is refused or ends."""
    rows, valid = [next_tokens(matcher)], 0
    for draft in drafts:
        if draft not in rows[-1]:
            break
        matcher.accept([draft])
        valid += 1
        if draft == EOS or matcher.is_finished:
            rows += [[EOS]] * (draft != EOS)
            break
        rows.append(next_tokens(matcher))
    matcher.rollback(valid)
    return rows[: valid + 1], valid


@pytest.mark.parametrize("seed", range(30))
def test_draft_rows_are_those_of_the_plain_loop(seed):
    chance = random.Random(seed)
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"], "maxLength": 4}}, "required": ["a"]}
    grammar = compiled(json=schema, disable_any_whitespace=True)
    matcher, other = grammar.matcher(), grammar.matcher()
    text = TOKENIZER.encode(chance.choice(['{"a":null}', '{"a":"é"}', '{"a":"ab","c":12}']))
    place = 0
    while not matcher.is_finished:
        drafts = text[place : place + chance.randint(1, 7)] + [chance.randrange(len(TOKENIZER)) for _ in range(2)]
        if chance.random() < 0.3:
            drafts = [chance.randrange(len(TOKENIZER)), *drafts]
        rows = new_rows(len(drafts) + 2)
        valid = matcher.fill_drafts(rows, drafts)
        want, want_valid = expected_rows(other, drafts)
        # An end token behind a finished grammar is allowed, once.
        assert valid == want_valid or (valid == want_valid + 1 and drafts[want_valid] == EOS)
        for i in range(len(want)):
            assert allowed(rows[i]) == want[i]
        if valid < len(drafts) and (valid == 0 or drafts[valid - 1] != EOS):
            assert drafts[valid] not in allowed(rows[valid])
        assert (rows[len(drafts) + 1] == -1).all()
        assert next_tokens(matcher) == next_tokens(other)  # nothing moved
        for state in (matcher, other):
            state.accept([text[place]])
        place += 1
    assert next_tokens(matcher) == [EOS]


def test_many_matchers_at_once_fill_what_one_does():
    grammars = [compiled(json=schema) for schema in SCHEMAS]
    matchers = [grammar.matcher() for grammar in grammars]
    mask = new_rows(2 * len(matchers) + 1)
    drafts = [TOKENIZER.encode("[")[:1] if i % 2 else [] for i in range(len(matchers))]
    entries = [(matcher, 2 * i + 1, d) for i, (matcher, d) in enumerate(zip(matchers, drafts, strict=True))]
    assert GrammarMatcher.fill_batch(mask, entries) == [None] * len(matchers)
    assert (mask[0] == -1).all()
    for matcher, first, d in entries:
        assert allowed(mask[first]) == next_tokens(matcher)
        if not d:
            assert (mask[first + 1] == -1).all()
    with pytest.raises(ValueError, match="rows"):
        GrammarMatcher.fill_batch(mask, [(matchers[0], len(mask) - 1, [1])])


def test_tokens_that_are_not_allowed_change_nothing():
    matcher = compiled(regex="ab?").matcher()
    with pytest.raises(ValueError, match="does not allow"):
        matcher.accept(TOKENIZER.encode("xy"))
    for bad in (VOCABULARY + 5, -1, 2**40):
        with pytest.raises(ValueError):
            compiled(regex="ab?").matcher().accept([bad])
    assert TOKENIZER.encode("a")[0] in next_tokens(matcher)
    with pytest.raises(ValueError):
        matcher.rollback(1)


def test_drafts_that_are_no_tokens_are_refused_like_others():
    matcher, rows = compiled(regex="ab?").matcher(), new_rows(4)
    start = TOKENIZER.encode("a")
    assert matcher.fill_drafts(rows, [*start, VOCABULARY + 5, -1]) == 1
    assert allowed(rows[1]) == sorted([*TOKENIZER.encode("b"), EOS]) and (rows[2:] == -1).all()
    matcher.accept(start)


def test_masks_of_other_kinds_are_refused():
    matcher = compiled(regex="a").matcher()
    for bad in (torch.zeros(WORDS, dtype=torch.int64), new_rows(2), torch.zeros(2 * WORDS, dtype=torch.int32)[::2]):
        with pytest.raises(ValueError):
            matcher.fill(bad)


def test_matchers_of_one_grammar_are_independent_and_compiled_once():
    first, second = compiled(regex="[ab]{3}"), compiled(regex="[ab]{3}")
    assert first is second
    one, two = first.matcher(), first.matcher()
    one.accept(TOKENIZER.encode("a"))
    assert len(next_tokens(two)) > 0
    two.accept(TOKENIZER.encode("b") * 3)
    assert two.is_finished and not one.is_finished
    one.rollback(1)
    assert next_tokens(one) == next_tokens(first.matcher())


def test_compiling_from_many_threads():
    manager = StructuredOutputManager(TOKENIZER, VOCABULARY)
    found = []
    threads = [
        threading.Thread(
            target=lambda i=i: found.append(manager.compile(StructuredOutputsParams(regex=f"a{{{i % 5}}}")))
        )
        for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20


# ---- recursion, hostile grammars ----


def test_recursive_schemas_take_deep_documents():
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    two = {
        "$defs": {
            "a": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/b"}}]},
            "b": {"anyOf": [{"type": "integer"}, {"type": "object", "additionalProperties": {"$ref": "#/$defs/a"}}]},
        },
        "$ref": "#/$defs/a",
    }
    assert accepts('{"children":[{"children":[]},{}]}', json=tree)
    assert accepts('[1,{"x":[2]},{"y":null}]', json=two)
    matcher = compiled(json=tree).matcher()
    matcher.accept(TOKENIZER.encode('{"children":[' * 2000))
    assert next_tokens(matcher)
    matcher.accept(TOKENIZER.encode("]}" * 2000))
    assert matcher.is_accepting


HOSTILE = {
    "itself": {"json": {"$ref": "#"}},
    "each other": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    "pattern": {"json": {"type": "string", "pattern": "(" * 100_000}},
    "pattern of classes": {"json": {"type": "string", "pattern": "[" * 100_000}},
    "regex": {"regex": "(" * 100_000 + ")" * 100_000},
    "deep text": {"json": '{"type":"object","properties":{"a":' * 10_000 + "{}" + "}}" * 10_000},
    "deep array text": {"json": '{"const":' + "[" * 10_000 + "]" * 10_000 + "}"},
    "deep unclosed text": {"json": '{"a":"\\"' * 100_000},
    "deep grammar": {"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000},
    "deep gbnf": {"grammar": "root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000},
    "rules": {"grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(50_000)) + 'a50000: "x"'},
    "references": {
        "json": {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(20_000)}}
    },
    "products": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"{c}{i}": {"type": "null"}}} for c in "ab"]} for i in range(40)]}
    },
    "multiple": {"json": {"type": "integer", "multipleOf": 1_000_003}},
    "multiples": {"json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}},
    "small multiple": {"json": {"type": "number", "multipleOf": 1000.003}},
    "multiple in a grammar": {"grammar": 'start: %json {"type":"integer","multiple\\u004ff":1000003}'},
    "enum": {"json": {"enum": [f"x{i}" for i in range(300_000)]}},
    "intersections": {"grammar": "start: A\nA: " + " & ".join(f"/(.|\\n)*{i}(.|\\n)*/" for i in range(60))},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_bounded_time(name):
    start = time.monotonic()
    with pytest.raises(ValueError) as caught:
        compiled(**HOSTILE[name])
    assert 0 < len(str(caught.value)) < 4000
    assert time.monotonic() - start < 30  # seconds by far less; the bound is against hanging


def test_deep_objects_are_refused():
    schema = {}
    for _ in range(10_000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested"):
        compiled(json=schema)


_DEEP_CHAINS = """
import sys
sys.path.insert(0, sys.argv[1])
from test_structured_output import compiled
n = 9000
compiled(grammar="start: a0\\n" + "".join(f"a{i}: a{i + 1}\\n" for i in range(n)) + f'a{n}: "x"')
compiled(grammar="start: A0\\n" + "".join(f'A{i}: "x" | "y" A{i + 1}\\n' for i in range(n)) + f'A{n}: "x"')
compiled(json={"$ref": "#/$defs/0", "$defs": {**{str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(n)},
                                               str(n): {"type": "null"}}})
print("alive")
"""


def test_the_longest_chains_that_are_let_through_leave_the_process_alive():
    import os

    done = subprocess.run(
        [sys.executable, "-c", _DEEP_CHAINS, os.path.dirname(__file__)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "alive" in done.stdout, done.stderr[-2000:]
