"""Conversations before they reach a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

INVALID = "_invalid_json"


def is_conversation(messages: Any) -> bool:
    """Return whether this is one conversation (a list of messages), not a list of them."""
    return bool(messages) and isinstance(messages[0], Mapping)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of a conversation in the form that chat templates expect.

    Arguments of tool calls come as JSON texts over the wire, while templates want mappings. An object inside a text, or
    inside a text inside a text, becomes the mapping; empty ones and null become ``{}``. What is no object (a list, a
    text cut off by a length limit) becomes ``{"_invalid_json": the text}``: the model sees what it wrote, and the
    conversation can go on.

    Raises
    ------
    ValueError
        Where a message is no mapping with a role.

    Examples
    --------
    >>> call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    >>> for_template([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"][0]["function"]["arguments"]
    {'a': 3}
    """
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise ValueError(f"messages must be a list of messages, not empty, got {messages!r:.80}")
    result = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"a message must be a dict with a 'role', got {message!r:.80}")
        message = dict(message)
        message.setdefault("content", None if message.get("tool_calls") else "")
        if message["content"] is None:
            message["content"] = ""  # templates add texts up
        if message.get("tool_calls"):
            message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        result.append(message)
    return result


def _call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise ValueError(f"a tool call must be a dict, got {call!r:.80}")
    call = dict(call)
    holder = dict(call["function"]) if isinstance(call.get("function"), Mapping) else call
    holder["arguments"] = _arguments(holder.get("arguments"))
    if holder is not call:
        call["function"] = holder
    return call


def _arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    text = value
    for _ in range(2):  # once serialised, or by mistake twice
        if value is None or (isinstance(value, str) and not value.strip()):
            return {}
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            break
        if isinstance(value, dict):
            return value
    if value is None:
        return {}
    return {INVALID: text if isinstance(text, str) else json.dumps(text)}
