"""What the grammar of a JSON schema lets through, the schema's own checker accepts; the rest is refused by name."""

import json
import random
import re

import pytest
import torch

pytest.importorskip("llguidance")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from torch_quartz.engine.structured_output import StructuredOutputManager, StructuredOutputsParams  # noqa: E402
from torch_quartz.engine.structured_output_schema import MAX_OPTIONAL_PROPERTIES, guarded_schema  # noqa: E402

_END = "<end>"


@pytest.fixture(scope="module")
def tokenizer():
    """Return one with a token a byte: every spelling of a text can be asked for."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_END)


@pytest.fixture(scope="module")
def manager(tokenizer):
    return StructuredOutputManager(tokenizer, len(tokenizer))


def _accepts(manager, tokenizer, schema, text):
    matcher = manager.compile(StructuredOutputsParams(json=schema)).matcher()
    try:
        matcher.accept(tokenizer(text, add_special_tokens=False)["input_ids"])
    except ValueError:
        return False
    return matcher.is_accepting


_TYPES = {"object": dict, "array": list, "string": str, "null": type(None), "boolean": bool}


def _is_of(value, kind):
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
    return isinstance(value, _TYPES[kind])


def _obeys(value, schema, root):
    """Check a value by the words of the specification, for the keywords of these tests."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        target = root
        for step in schema["$ref"].split("/")[1:]:
            target = target[step]
        if not _obeys(value, target, root):
            return False
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        if not any(_is_of(value, kind) for kind in kinds):
            return False
    if "enum" in schema and not any(type(value) is type(one) and value == one for one in schema["enum"]):
        return False
    if "anyOf" in schema and not any(_obeys(value, one, root) for one in schema["anyOf"]):
        return False
    if not all(_obeys(value, one, root) for one in schema.get("allOf", ())):
        return False
    if _is_of(value, "number"):
        if value < schema.get("minimum", value) or value > schema.get("maximum", value):
            return False
        if "multipleOf" in schema and value % schema["multipleOf"]:
            return False
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            return False
        if "pattern" in schema and not re.search(schema["pattern"], value):
            return False
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            return False
        first = schema.get("prefixItems", [])
        if not all(_obeys(item, one, root) for item, one in zip(value, first, strict=False)):
            return False
        if not all(_obeys(item, schema.get("items", True), root) for item in value[len(first) :]):
            return False
    if isinstance(value, dict):
        if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)):
            return False
        if not all(key in value for key in schema.get("required", ())):
            return False
        for key, item in value.items():
            rules = [schema["properties"][key]] if key in schema.get("properties", {}) else []
            rules += [rule for text, rule in schema.get("patternProperties", {}).items() if re.search(text, key)]
            if not all(_obeys(item, rule, root) for rule in rules or [schema.get("additionalProperties", True)]):
                return False
    return True


_SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "integer"}},
    {"type": "integer", "multipleOf": 3, "minimum": 4, "maximum": 400},
    {"type": "number", "minimum": -2.5, "maximum": 2.5},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[ab]{1,4}$"},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"enum": ["x", 1, None]}, "maxItems": 4},
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}, "minItems": 2}]},
    {"$defs": {"i": {"type": "integer"}}, "allOf": [{"$ref": "#/$defs/i"}, {"minimum": 3}]},
]


@pytest.mark.parametrize("number", range(len(_SCHEMAS)))
def test_random_walks_obey_the_schema(manager, tokenizer, number):
    schema, words = _SCHEMAS[number], (len(tokenizer) + 31) // 32
    grammar, chance = manager.compile(StructuredOutputsParams(json=schema)), random.Random(number)
    liked = set(tokenizer('{}[]",:\\u0061ab13tfn', add_special_tokens=False)["input_ids"])
    complete = 0
    for _ in range(60):
        matcher, ids = grammar.matcher(), []
        while len(ids) < 120:
            row = torch.zeros(words, dtype=torch.int32)
            matcher.fill(row)
            allowed = [one for one in range(len(tokenizer)) if row[one // 32].item() >> (one % 32) & 1]
            if tokenizer.eos_token_id in allowed and (len(allowed) == 1 or chance.random() < 0.3):
                complete += 1
                value = json.loads(bytes_of(tokenizer, ids).decode())
                assert _obeys(value, schema, schema), value
                break
            allowed = [one for one in allowed if one != tokenizer.eos_token_id]
            likely = [one for one in allowed if one in liked] if chance.random() < 0.9 else []
            ids.append(chance.choice(likely or allowed))
            matcher.accept(ids[-1:])
    assert complete >= 10


def bytes_of(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False).encode()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, r'{"a":1,"\u0061":"x"}'),
        ({"type": "object", "properties": {"a\nb": {"type": "integer"}}}, r'{"a\u000Ab":"x"}'),
        ({"type": "object", "properties": {"\U0001f600": {"type": "integer"}}}, r'{"\ud83d\ude00":"x"}'),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061b":"x"}'),
        ({"type": "array", "items": {"properties": {"a": {"type": "integer"}}, "type": "object"}}, r'[{"\u0061":"x"}]'),
        ({"$ref": "#/x", "x": {"type": "object", "properties": {"a": {"type": "null"}}}}, r'{"\u0061":1}'),
        ({"type": "integer", "multipleOf": 3}, "4"),
        ({"type": "integer", "minimum": 3}, "2"),
        ({"type": "integer", "minimum": 3}, "03"),
        ({"type": "object", "minProperties": 1}, "{}"),
        ({"type": "object", "maxProperties": 1}, '{"a":1,"b":2}'),
        ({"type": "string", "maxLength": 1}, '"e\u0301"'),
        ({"type": "string", "minLength": 2}, '"\U0001f600"'),
        ({"type": "string", "minLength": 2}, r'"\ud83d\ude00"'),
    ],
)
def test_value_that_breaks_the_schema_does_not_pass(manager, tokenizer, schema, text):
    assert not _accepts(manager, tokenizer, schema, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (True, '[1, {"a": null}]'),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a": 1, "b": "x\\n"}'),
        ({"type": "string", "maxLength": 1}, '"\u00e9"'),
        ({"type": "string", "maxLength": 1}, '"\U0001f600"'),
        ({"type": "string", "maxLength": 1}, r'"\ud83d\ude00"'),
        ({"type": "object", "required": ["a", "b"], "minProperties": 2}, '{"a": 1, "b": 2}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[" * 2000 + "]" * 2000),
    ],
)
def test_value_that_obeys_passes(manager, tokenizer, schema, text):
    assert _accepts(manager, tokenizer, schema, text)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 7}}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"items": {"type": "object", "patternProperties": {"a": {}}, "minProperties": 2}}, "minProperties at #/items"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "x-guidance"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}, "x-guidance"),
        ({"x-guidance": {"key_separator": "="}}, "x-guidance"),
        ({"const": b"x"}, "bytes"),
        ({"const": float("nan")}, "finite"),
        ({"properties": {1: {}}}, "keys"),
        (False, "false"),
        ({"$ref": "#"}, "requires itself"),
        ({"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}, "requires itself"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "requires itself"),
        (
            {
                "$defs": {
                    "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"allOf": [{"$ref": "#/$defs/a"}]}]},
                    "b": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}], "minItems": 1},
                },
                "$ref": "#/$defs/a",
            },
            "requires itself",
        ),
        (
            {"type": "object", "properties": {f"p{one}": {} for one in range(MAX_OPTIONAL_PROPERTIES + 1)}},
            str(MAX_OPTIONAL_PROPERTIES),
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(manager, schema, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        manager.compile(StructuredOutputsParams(json=schema))


def test_words_of_the_compiler_may_be_names_of_properties():
    schema = {"type": "object", "properties": {"x-guidance": {"type": "integer"}}, "default": {"x-guidance": 1}}
    assert guarded_schema("json", schema)["properties"] == schema["properties"]


def test_long_chains_of_references_are_finite():
    chain = {f"d{one}": {"$ref": f"#/$defs/d{one + 1}"} for one in range(3000)}
    guarded_schema("json", {"$defs": {**chain, "d3000": {"type": "integer"}}, "$ref": "#/$defs/d0"})
    guarded_schema("json", {"$defs": {"d3000": {"type": "integer"}, **chain}, "$ref": "#/$defs/d0"})


def test_tags_are_guarded_too(manager, tokenizer):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tag = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f>"]}
    grammar = manager.compile(StructuredOutputsParams(structural_tag=tag))
    grammar.matcher().accept(tokenizer('say <f>{"a": 1}</f>', add_special_tokens=False)["input_ids"])
    with pytest.raises(ValueError, match="does not allow"):
        grammar.matcher().accept(tokenizer(r'say <f>{"\u0061": "x"}</f>', add_special_tokens=False)["input_ids"])


def test_names_and_chains_of_any_size_are_looked_through_in_bounded_time():
    guarded_schema("json", {"properties": {"k" * 500_000: {"anyOf": [{"minLength": 1} for _ in range(20_000)]}}})
    chain = {f"d{one}": {"$ref": f"#/$defs/d{one + 1}"} for one in reversed(range(10_000))}
    guarded_schema("json", {"$defs": {"d10000": {"type": "integer"}, **chain}, "$ref": "#/$defs/d0"})
    knot = {f"d{one}": {"anyOf": [{"$ref": f"#/$defs/d{one + step}"} for step in (1, 2)]} for one in range(5_000)}
    with pytest.raises(ValueError, match="requires itself"):
        guarded_schema(
            "json",
            {"$defs": {**knot, "d5000": {"$ref": "#"}, "d5001": {"$ref": "#"}}, "$ref": "#/$defs/d0"},
        )


def test_schemas_in_grammars_are_guarded_too(manager, tokenizer):
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}, "%json": {"type": "null"}}})
    grammar = manager.compile(
        StructuredOutputsParams(grammar=f'start: "=" one | %json {schema} "!"\none: %json {schema}')
    )
    for text, right in (
        ('={"a": 1}', True),
        ('{"a": 1}!', True),
        (r'={"\u0061": "x"}', False),
        ('{"%json": 1}!', False),
    ):
        matcher = grammar.matcher()
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if right:
            matcher.accept(ids)
            assert matcher.is_accepting
        else:
            with pytest.raises(ValueError, match="does not allow"):
                matcher.accept(ids)
