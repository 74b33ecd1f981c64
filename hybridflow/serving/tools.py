"""Tools that a chat's model may call: what a request says of them, and calls in answers, in OpenAI's form. No torch.

Calls are read in one form, that of Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.errors import DataError

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_ASKS_FOR_CALLS = re.compile(r'<tool_call>.*"arguments\\?"', re.DOTALL)
"""In a template, as the text of an example."""


def read_tools(fields: Mapping[str, Any], template: str | None) -> list[Any]:
    """Return what the model may call, from the fields of a request; empty: nothing.

    Raises:
        DataError: It is malformed, or cannot be had with this template.
    """
    tools, choice = fields.get("tools", []), fields.get("tool_choice", "auto")
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        form = {"type": "function", "function": {"name": "…", "parameters": {}}}
        raise DataError(f"tools: found {tools!r:.60}, expected a list of {json.dumps(form, ensure_ascii=False)}")
    if choice not in ("auto", "none"):
        raise DataError(f"tool_choice: found {choice!r:.60}, expected 'auto' or 'none': a call cannot be forced")
    if not tools or choice == "none":
        return []
    if template is not None and not _ASKS_FOR_CALLS.search(template):
        raise DataError(
            'tools: the chat template does not ask for calls as <tool_call>{"name": …, "arguments": …}</tool_call>, '
            "the one form that is read from answers; describe the tools in a message instead"
        )
    return tools


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and value.get("type") == "function"


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Return what an answer says beside its calls, and the calls; where one of them is malformed all is text."""
    calls = [_read_call(found[1]) for found in _CALL.finditer(text)]
    if not all(calls):
        return text, []
    return (_CALL.sub("", text).strip() if calls else text), [call for call in calls if call is not None]


def _read_call(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    function = {"name": found["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def numbered(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return calls as a stream has them."""
    return [{"index": index, **call} for index, call in enumerate(calls)]
