"""From `StructuredOutputsParams` to a grammar text of llguidance: one way for each field, within bounds."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from torch_quartz.engine.structured_output_schema import guarded_schema

_FIELDS = ("json", "regex", "grammar", "choice", "json_object", "structural_tag")
_WHITESPACE = ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties")

# Bounds on what the compiler gets, for time and stack. The longest published schemas have some 100 KB.
MAX_CHARACTERS = 2**20
# llguidance reads JSON to a depth of 128 including its own frame.
MAX_DEPTH = 120
# Definitions and references, counted as colons outside of JSON and as "$ref" inside.
MAX_RULES = 10_000
# The automaton of "multipleOf" has that many states: 0.2 s at 10,000, 20 s at 1,000,000, and from 20,000 on, bounds
# beside it exceed llguidance's limits. Schemas that are merged (allOf, $ref) have the least common multiple.
MAX_MULTIPLE = 10_000


@dataclass(frozen=True)
class StructuredOutputsParams:
    r"""The grammar that an output obeys: exactly one of the first six.

    Parameters
    ----------
    json : dict, str, bool or object
        A JSON schema: as a dict, as its text, or something with ``model_json_schema()`` (a Pydantic model).
    regex : str
        A regular expression of Rust's syntax that the whole output matches.
    grammar : str
        A context-free grammar in the Lark syntax of llguidance, with a rule ``start``. One with ``::=`` is taken as
        GBNF (llama.cpp) with a rule ``root``.
    choice : list of str
        One of these texts.
    json_object : bool
        True: any JSON object.
    structural_tag : dict or str
        Free text in which triggers begin parts that obey schemas:
        ``{"structures": [{"begin": "<f=x>", "schema": {...}, "end": "</f>"}], "triggers": ["<f="]}``, or its text.
    disable_any_whitespace : bool
        Of `json` and `json_object`: no whitespace between the parts.
    whitespace_pattern : str, optional
        Of `json` and `json_object`: the regular expression of whitespace between the parts, in place of any.
    disable_additional_properties : bool
        Of `json`: objects with "properties" that do not speak of other ones have no other ones.

    Raises
    ------
    ValueError
        Names the field, the rule and the value.

    Examples
    --------
    >>> StructuredOutputsParams(regex=r"\d{4}").kind
    'regex'
    """

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False

    def __post_init__(self) -> None:
        given = [name for name in _FIELDS if getattr(self, name) is not None]
        if len(given) != 1:
            _refuse(f"exactly one of {', '.join(_FIELDS)} must be given", given)
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                _refuse(f"{name} must be a text that is not empty", value)
        if self.choice is not None:
            texts = None if isinstance(self.choice, (str, bytes)) else list(self.choice)
            if not texts or not all(isinstance(text, str) for text in texts):
                _refuse("choice must be a list of texts that is not empty", self.choice)
            object.__setattr__(self, "choice", texts)
        if self.json_object is not None and self.json_object is not True:
            _refuse("json_object must be True where given", self.json_object)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                _refuse(f"{name} must be True or False", getattr(self, name))
        if self.whitespace_pattern is not None and not isinstance(self.whitespace_pattern, str):
            _refuse("whitespace_pattern must be a text", self.whitespace_pattern)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            _refuse("only one of disable_any_whitespace and whitespace_pattern can be given", self.whitespace_pattern)
        for name in _WHITESPACE:
            allowed = ("json",) if name == "disable_additional_properties" else ("json", "json_object")
            if getattr(self, name) and self.kind not in allowed:
                _refuse(f"{name} is about {' and '.join(allowed)} alone", f"{name} with {self.kind}")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _FIELDS if getattr(self, name) is not None)


def grammar_source(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> str:
    """Return what llguidance compiles.

    Parameters
    ----------
    params : StructuredOutputsParams
        What was asked for.
    special_tokens : dict of str to int
        Triggers of `structural_tag` may be special tokens.

    Raises
    ------
    ValueError
        The text is no JSON, too long, too deep, or says what llguidance would pass over in silence.
    """
    from llguidance import LLMatcher

    kind = params.kind
    if kind == "regex":
        _check_length(kind, params.regex)
        return LLMatcher.grammar_from_regex(params.regex)
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(_lark(params.grammar))
    if kind == "choice":
        # One lexeme: as alternatives of a rule, more than 2000 texts would exceed llguidance's row.
        text = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
        _check_length(kind, text)
        return LLMatcher.grammar_from_lark(text)
    if kind == "structural_tag":
        return LLMatcher.grammar_from_lark(_structural_tag(params.structural_tag, special_tokens))
    schema = read_schema(kind, {"type": "object"} if kind == "json_object" else params.json)
    if params.disable_additional_properties:
        schema = _close_objects(schema)
    overrides: dict[str, Any] = {}
    if params.disable_any_whitespace:
        overrides["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        overrides["whitespace_pattern"] = params.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)


def read_schema(name: str, value: Any) -> Any:
    """Return a schema as a dict with the compiler's options in it, checked against the bounds.

    Parameters
    ----------
    name : str
        Of the field, for messages.
    value : dict, str, bool or object
        The schema, its text, or something with ``model_json_schema()``.
    """
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        _check_length(name, value)
        _check_depth_of_text(name, value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} must be the text of a JSON schema: {error}") from error
    if not isinstance(value, (Mapping, bool)):
        raise ValueError(f"{name} must be a JSON schema (dict, its text, or a model), got {type(value).__name__}")
    _check_schema(name, value)
    return guarded_schema(name, value)


def _refuse(rule: str, value: Any) -> None:
    shown = repr(value)
    raise ValueError(f"StructuredOutputsParams: {rule}, got {shown if len(shown) <= 200 else shown[:200] + ' ...'}")


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{name} must have at most {MAX_CHARACTERS} characters, got {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be valid Unicode: {error}") from error


def _check_depth_of_text(name: str, text: str) -> None:
    depth = 0
    for part in re.finditer(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', text):
        found = part.group()
        depth += 1 if found in "[{" else -1 if found in "]}" else 0
        if depth > MAX_DEPTH:
            raise ValueError(
                f"{name} must be nested at most {MAX_DEPTH} deep, and is deeper at character {part.start()}"
            )


def _check_schema(name: str, schema: Any) -> None:
    """Check depth, size and what the compiler does not name, without recursion."""
    level, depth, characters, references = [schema], 0, 0, 0
    multiples: set[Any] = set()
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"{name} must be nested at most {MAX_DEPTH} deep")
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                references += "$ref" in value
                characters += sum(len(key) + 6 for key in value if isinstance(key, str))
                _check_options(name, value)
                multiple = value.get("multipleOf")
                if isinstance(multiple, (int, float)) and not isinstance(multiple, bool):
                    multiples.add(multiple)
                below.extend(value.values())
            elif isinstance(value, (list, tuple)):
                characters += 2 * len(value)
                below.extend(value)
            else:
                characters += len(value) if isinstance(value, str) else 4
        if characters > MAX_CHARACTERS:
            raise ValueError(f"{name} must have at most {MAX_CHARACTERS} characters")
        level = below
    if references > MAX_RULES:
        raise ValueError(f"{name} must have at most {MAX_RULES} references ($ref), got {references}")
    _check_multiples(name, multiples)


def _check_options(name: str, schema: Mapping[str, Any]) -> None:
    options = schema.get("x-guidance")
    if isinstance(options, Mapping) and options.get("lenient"):
        raise ValueError(f"{name}: x-guidance must not be lenient, because keywords would be dropped in silence")


def _check_multiples(name: str, multiples: set[Any]) -> None:
    numbers = [Decimal(str(value)) for value in multiples]
    if not all(number.is_finite() and number > 0 for number in numbers):
        raise ValueError(f"{name}: multipleOf must be above 0, got {sorted(multiples)}")
    if not numbers:
        return
    if max(abs(number.adjusted()) + len(number.as_tuple().digits) for number in numbers) > 30:
        raise ValueError(f"{name}: multipleOf must have at most 30 digits, got {sorted(multiples)}")
    unit = Decimal(1).scaleb(min(0, *(number.as_tuple().exponent for number in numbers)))
    common = math.lcm(*(int(number / unit) for number in numbers))
    if common > MAX_MULTIPLE:
        raise ValueError(
            f"{name}: multipleOf must have a least common multiple of at most {MAX_MULTIPLE} (in units of {unit}), "
            f"got {sorted(multiples)[:20]}"
        )


def _close_objects(schema: Any) -> Any:
    """Return the schema with "additionalProperties": false wherever "properties" stand without a word on others."""
    if isinstance(schema, Mapping):
        closed = {key: _close_objects(value) for key, value in schema.items()}
        if "properties" in closed and not {"additionalProperties", "patternProperties"} & closed.keys():
            closed["additionalProperties"] = False
        return closed
    return [_close_objects(value) for value in schema] if isinstance(schema, (list, tuple)) else schema


def _lark(text: str) -> str:
    _check_length("grammar", text)
    if "::=" in text:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            text = any_to_lark(text)
        except (Exception, RecursionError) as error:
            raise ValueError(f"grammar: GBNF that llguidance cannot read: {error}") from error
    if text.count(":") > MAX_RULES:
        raise ValueError(f"grammar must have at most {MAX_RULES} rules (colons), got {text.count(':')}")
    pieces, place = [], 0
    for part in re.finditer(r"%json\s*", text):
        if part.start() < place:
            continue  # inside of a schema
        pieces.append(text[place : part.end()])
        try:
            schema, place = json.JSONDecoder().raw_decode(text, part.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"grammar: %json must be followed by a JSON schema: {error}") from error
        pieces.append(json.dumps(read_schema("grammar: %json", schema)))
    return "".join((*pieces, text[place:]))


def _structural_tag(value: Any, special_tokens: Mapping[str, int]) -> str:
    """Return the Lark grammar of free text with tagged parts."""
    if isinstance(value, str):
        _check_length("structural_tag", value)
        _check_depth_of_text("structural_tag", value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structural_tag must be JSON: {error}") from error
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    rule = "structural_tag must be a dict of exactly structures and triggers"
    if not isinstance(value, Mapping) or set(value) - {"type"} != {"structures", "triggers"}:
        raise ValueError(f"{rule}, got {sorted(value) if isinstance(value, Mapping) else type(value).__name__}")
    if value.get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"structural_tag: type must be 'structural_tag', got {value['type']!r}")
    structures, triggers = value["structures"], value["triggers"]
    for name, entries in (("structures", structures), ("triggers", triggers)):
        if not isinstance(entries, (list, tuple)) or not entries:
            raise ValueError(f"structural_tag: {name} must be a list that is not empty, got {entries!r}")
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise ValueError(f"structural_tag: triggers must be texts that are not empty, got {triggers!r}")
    rules = []
    for number, structure in enumerate(structures):
        if not isinstance(structure, Mapping) or set(structure) != {"begin", "schema", "end"}:
            raise ValueError(
                f"structural_tag: a structure must have exactly begin, schema and end, got {structure!r:.200}"
            )
        begin, end = structure["begin"], structure["end"]
        if not isinstance(begin, str) or not isinstance(end, str):
            raise ValueError(f"structural_tag: begin and end must be texts, got {begin!r} and {end!r}")
        trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"structural_tag: begin must start with one of the triggers {triggers}, got {begin!r}")
        schema = json.dumps(read_schema("structural_tag schema", structure["schema"]))
        body = " ".join(
            part for part in (_text(begin[len(trigger) :]), f"%json {schema}", _text(end, special_tokens)) if part
        )
        if trigger in special_tokens:
            rules.append(f"tag_{number}: TEXT <[{special_tokens[trigger]}]> {body}")
        else:
            rules.append(f"trigger_{number}[lazy]: TEXT {_text(trigger)}\ntag_{number}: trigger_{number} {body}")
    tags = " | ".join(f"tag_{number}" for number in range(len(rules)))
    text = "\n".join((f"start: ({tags})* tail", "tail: TEXT", r"TEXT: /(.|\n)*/", *rules))
    _check_length("structural_tag", text)
    return text


def _text(text: str, special_tokens: Mapping[str, int] | None = None) -> str:
    if special_tokens and text in special_tokens:
        return f"<[{special_tokens[text]}]>"
    return json.dumps(text, ensure_ascii=False) if text else ""
