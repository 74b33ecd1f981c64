"""Conversations as text, by the template that a tokenizer brings: the one door to ``jinja2``. No torch.

A template is a program that came with the weights, so it runs in jinja's sandbox, which lets it change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.data.tokenizer import Tokenizer, read_object
from hybridflow.errors import DataError

FILE = "chat_template.jinja"
_MOST_CHARACTERS = 1 << 20


def chat_template(tokenizer: Tokenizer) -> str | None:
    """The template beside a tokenizer; None: it has none.

    Raises:
        DataError: It cannot be read.
    """
    folder = tokenizer.path.parent
    try:
        return (folder / FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / FILE}: cannot be read: {error}; copy it anew") from error
    found = read_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def render_chat(template: str, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation as the text that the assistant's answer goes on from.

    Args:
        template: From ``chat_template``.
        tokenizer: Whose special tokens the template may name.
        messages: With ``role`` and ``content`` each.

    Raises:
        DataError: jinja2 is not installed, or the template refuses the conversation or fails.
    """
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise DataError(
            "a conversation needs the package jinja2, which is not installed; pip install jinja2, or send the text"
        ) from error

    def refuse(message: str) -> None:
        raise DataError(f"the chat template refuses the messages: {message}")

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    settings = read_object(tokenizer.path.parent / "tokenizer_config.json")
    special = {name: _piece(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    try:
        text = environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=True, **{k: v for k, v in special.items() if v is not None}
        )
    except DataError:
        raise
    # A template may do whatever a small program can do wrong.
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
        raise DataError(f"the chat template fails: {type(error).__name__}: {error}; send the text itself") from error
    if len(text) > _MOST_CHARACTERS:
        raise DataError(f"the chat template made {len(text)} characters, more than {_MOST_CHARACTERS}")
    return text


def read_messages(value: Any, where: str) -> list[dict[str, str]]:
    """The messages of a conversation, from JSON; their content as text.

    Raises:
        DataError: It is no such list.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: found {value!r:.60}, expected a list of messages, at least one")
    return [_message(each, f"{where}[{index}]") for index, each in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(f"{where}: found {value!r:.60}, expected an object with role and content")
    content = value.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where}: content: found {content!r:.60}, expected text, or a list of parts of type text")
    others = {name: text for name, text in value.items() if isinstance(text, str)}
    return {**others, "content": content}


def _piece(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None
