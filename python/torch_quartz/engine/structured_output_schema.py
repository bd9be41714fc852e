"""JSON schemas that the compiler would take and not honour, or not finish: found before it sees them.

llguidance names most keywords that it does not implement. What it lets through, seen with 1.9.1:

- A key that is written with an escape (``"\\u0061"`` is ``"a"``) counts as another key, so that a value escapes the
  schema of "properties" or "patternProperties". Where an object has such keys and lets others in, ``\\u`` is not
  allowed.
- The same free key twice counts as two for "minProperties".
- "x-guidance" in a schema turns checks off ("lenient", "coerce_one_of") or changes the separators of JSON.
- A schema that only endless values obey ("c" is required in "c") compiles, and the output never ends.
- Time grows with the square of an object's optional properties: 1.2 s for 2,000, 45 s for 10,000.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

# Compile time of optional properties is about 0.3 us times the sum of their squares.
MAX_OPTIONAL_PROPERTIES = 2_000
# Letters behind a backslash in strings, without "u".
_PLAIN_ESCAPES = '"\\bfnrt'
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_SINGLE += ("unevaluatedProperties", "unevaluatedItems")
# Characters of a name in a path: paths of all parts are held at once.
_SHOWN = 40
# A pass settles what depends on what was settled before it; chains of references in bad order need more than one.
_PASSES = 50


def guarded_schema(name: str, schema: Any) -> dict[str, Any]:
    """Return a schema with the options under which llguidance honours all of it.

    Parameters
    ----------
    name : str
        Of the field, for messages.
    schema : dict or bool
        The schema, of bounded depth.

    Returns
    -------
    dict
        The schema with "x-guidance" at its root.

    Raises
    ------
    ValueError
        Names the keyword that cannot be honoured.

    Examples
    --------
    >>> guarded_schema("json", {"type": "integer"})["x-guidance"]["lenient"]
    False
    """
    if schema is False:
        raise ValueError(f"{name}: no value obeys the schema false")
    _check_values(name, schema)
    root = {} if schema is True else dict(schema)
    optional, shadows = 0, False
    for path, part in _walk(root):
        if "x-guidance" in part:
            raise ValueError(
                f"{name}: x-guidance at {path} cannot be honoured: options of the compiler are no part of a schema "
                "(whitespace has fields of its own)"
            )
        _check_min_properties(name, path, part)
        optional += _optional_properties(part) ** 2
        known = any(part.get(key) for key in ("properties", "patternProperties"))
        shadows |= bool(known) and part.get("additionalProperties", True) is not False
    if optional > MAX_OPTIONAL_PROPERTIES**2:
        raise ValueError(
            f"{name}: properties that are not required must be at most {MAX_OPTIONAL_PROPERTIES} (the root of the sum "
            f"of the squares over all objects), got {math.isqrt(optional)}"
        )
    if not _has_finite_value(root):
        raise ValueError(f"{name}: no finite value obeys the schema: something in it requires itself")
    # Escapes of all characters are JSON like the characters themselves, and count as one each in lengths. "lenient"
    # would drop keywords in silence.
    options: dict[str, Any] = {"lenient": False, "json_allow_general_unicode_escapes": True}
    if shadows:
        options["json_allowed_escapes"] = _PLAIN_ESCAPES
    return {**root, "x-guidance": options}


def _check_values(name: str, schema: Any) -> None:
    level = [schema]
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                strange = next((key for key in value if not isinstance(key, str)), None)
                if strange is not None:
                    raise ValueError(f"{name}: keys of a schema must be texts, got {strange!r}")
                below.extend(value.values())
            elif isinstance(value, (list, tuple)):
                below.extend(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}: numbers of a schema must be finite, got {value}")
            elif value is not None and not isinstance(value, (str, int, float)):
                raise ValueError(f"{name}: a schema is made of JSON values, got {type(value).__name__}")
        level = below


def _walk(root: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every schema that is a dict, with its path; what stands under "const", "enum" and the like is no schema.

    What a reference leads to is one, wherever it stands.
    """
    waiting: list[tuple[str, Any]] = [("#", root)]
    seen: set[int] = set()
    while waiting:
        path, part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        if isinstance(part.get("$ref"), str):
            waiting.append((part["$ref"][:_SHOWN], _target(root, part["$ref"])))
        for key in _MAPS:
            if isinstance(part.get(key), Mapping):
                waiting.extend((f"{path}/{key}/{str(entry)[:_SHOWN]}", below) for entry, below in part[key].items())
        for key in _LISTS:
            if isinstance(part.get(key), (list, tuple)):
                waiting.extend((f"{path}/{key}/{number}", below) for number, below in enumerate(part[key]))
        waiting.extend((f"{path}/{key}", part[key]) for key in _SINGLE if isinstance(part.get(key), Mapping))


def _names(value: Any) -> list[str]:
    return (
        list(dict.fromkeys(item for item in value if isinstance(item, str))) if isinstance(value, (list, tuple)) else []
    )


def _optional_properties(part: Mapping[str, Any]) -> int:
    properties = part.get("properties")
    return len(properties.keys() - set(_names(part.get("required")))) if isinstance(properties, Mapping) else 0


def _check_min_properties(name: str, path: str, part: Mapping[str, Any]) -> None:
    least = part.get("minProperties")
    if not isinstance(least, (int, float)) or least <= max(1, len(_names(part.get("required")))):
        return
    if part.get("additionalProperties", True) is False and not part.get("patternProperties"):
        return  # no key is free, and named ones come once
    raise ValueError(
        f"{name}: minProperties at {path} cannot be honoured above 1 and the number of required properties, because "
        f"the same key could come twice, got {least}"
    )


def _has_finite_value(root: Mapping[str, Any]) -> bool:
    parts = [part for _, part in _walk(root)]
    finite: set[int] = set()
    for _ in range(_PASSES):
        before = len(finite)
        for part in reversed(parts):
            if id(part) not in finite and _is_finite(part, root, finite):
                finite.add(id(part))
        if id(root) in finite:
            return True
        if len(finite) == before:
            return False
    return True  # not settled


def _is_finite(part: Mapping[str, Any], root: Mapping[str, Any], finite: set[int]) -> bool:
    """Return whether a finite value obeys a schema, going by what is known of those below. In doubt it does."""

    def known(below: Any) -> bool:
        return id(below) in finite if isinstance(below, Mapping) else below is not False

    def entries(key: str) -> list[Any]:
        return list(part[key]) if isinstance(part.get(key), (list, tuple)) else []

    if "const" in part or "enum" in part:
        return True
    if isinstance(part.get("$ref"), str) and not known(_target(root, part["$ref"])):
        return False
    if not all(known(below) for below in entries("allOf")):
        return False
    if any(entries(key) and not any(known(below) for below in entries(key)) for key in ("anyOf", "oneOf")):
        return False
    types = part.get("type")
    types = [types] if isinstance(types, str) else _names(types)
    if not types or set(types) - {"object", "array"}:
        return True
    if "object" in types:
        properties = part.get("properties") if isinstance(part.get("properties"), Mapping) else {}
        other = True if part.get("patternProperties") else part.get("additionalProperties", True)
        if all(known(properties.get(key, other)) for key in _names(part.get("required"))):
            return True
    if "array" in types:
        least = part.get("minItems", 0)
        least = least if isinstance(least, int) else 0
        first = entries("prefixItems") or entries("items")
        other = part.get("additionalItems" if isinstance(part.get("items"), (list, tuple)) else "items", True)
        return all(known(below) for below in first[:least]) and (least <= len(first) or known(other))
    return False


def _target(root: Mapping[str, Any], reference: str) -> Any:
    """Return what a JSON pointer into the schema means; True where it is something else."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    found: Any = root
    for step in reference[2:].split("/") if len(reference) > 1 else ():
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and step in found:
            found = found[step]
        elif isinstance(found, (list, tuple)) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return True
    return found if isinstance(found, (Mapping, bool)) else True
