"""Conversations as text, by the template that a tokenizer brings or a user gives. No torch.

A template is a program that came with weights or data. It runs in jinja's sandbox, which lets it change nothing, in a
process of its own, which has so much memory and time; see ``chat_process``.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.data import check_kwargs
from hybridflow.data.images import as_part
from hybridflow.data.limited import LimitedProcess
from hybridflow.data.pieces import PieceTokenizer
from hybridflow.data.tokenizer import Tokenizer, has_marks, read_object, special_names, tokenizer_settings
from hybridflow.errors import ConfigError, DataError
from hybridflow.foreign import read_small

FILE = "chat_template.jinja"
KWARGS = "chat_template_kwargs"
"""Field of a row, a prompt or a request with further variables for the template."""
_MOST_CHARACTERS = 1 << 20
# JSON writes a character beyond 16 bits as 12, and the error beside the text is short.
_MOST_ANSWER_BYTES = 12 * _MOST_CHARACTERS + (1 << 16)
_SAID, _NEXT = "0o7h", "7h0o"
"""Texts that no template writes by itself."""
_ANSWERED = ({"role": "user", "content": "1"}, {"role": "assistant", "content": _SAID})
_START_S, _RENDER_S = 60.0, 5.0
_MEMORY_BYTES = 1 << 29
_ARGUMENTS = r"""(?:\.|\[['"])arguments\b['"\]]*"""
_NAMED = re.compile(rf"\bset\s+(\w+)\s*=\s*\w+(?:\.\w+|\[[^\]]*\])*?{_ARGUMENTS}\s*-?%}}")
_AS_OBJECT = r"\s*(?:\|\s*(?:tojson|items)\b|\.items\(|is\s+mapping\b)"
_WHOLE_CALL = re.compile(r"""\b(?:function|(?:tool_)?calls?)['"\]]*\s*\|\s*tojson\b""")


def chat_template(tokenizer: Tokenizer) -> str | None:
    """Return the template beside a tokenizer, as ``template_in`` does."""
    return template_in(tokenizer.path.parent)


def template_in(folder: Path) -> str | None:
    """Return the template in a tokenizer's directory; None: it has none.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return read_small(folder / FILE, _MOST_CHARACTERS).decode("utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / FILE}: cannot be read: {error}; copy it anew") from error
    found = read_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens that a template may use: ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token``."""
    settings = tokenizer_settings(tokenizer.path.parent)
    pieces = {name: _piece(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return {name: piece for name, piece in pieces.items() if piece is not None}


def is_plain(prompt: str, begins: bool, tokenizer: Tokenizer) -> bool:
    """Return whether a prompt is plain text although the tokenizer has a chat template, which is seldom meant.

    Args:
        prompt: Its text.
        begins: Whether a template has rendered it.
        tokenizer: What encodes it.
    """
    return not begins and chat_template(tokenizer) is not None and not has_marks(prompt, special_names(tokenizer))


def render_chat(
    template: str,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation as the text that the assistant's answer continues; see ``Chat.render``.

    Args:
        template: From ``chat_template``.
        tokenizer: The tokenizer whose special tokens the template may name.
        messages: With ``role`` and ``content`` each.
        tools: What the assistant may call.
        kwargs: Other variables of the template.

    Raises:
        DataError: As for ``Chat.render`` and ``check_special``.
    """
    text = _shared(os.getpid(), template, json.dumps(special_tokens(tokenizer))).render(messages, tools, kwargs)
    check_special(text, [messages, tools, kwargs], tokenizer)
    return text


def turn_end_id(template: str, tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> int:
    """Return the token with which a template ends what an assistant says.

    It is the first of the tokenizer's ``stop_ids`` that the template writes there. Where the template writes none, it
    is the end of sequence.

    Args:
        template: From ``chat_template``.
        tokenizer: What will encode the text.
        kwargs: Other variables of the template.

    Raises:
        DataError: As for ``render_chat``.
    """
    if len(tokenizer.stop_ids) == 1:
        return tokenizer.eos_id
    return _turn_end_id(template, tokenizer, json.dumps(dict(kwargs)))  # type: ignore[arg-type]  # hashed as itself


@functools.lru_cache(maxsize=4)
def _turn_end_id(template: str, tokenizer: Tokenizer, kwargs: str) -> int:
    text = _shared(os.getpid(), template, json.dumps(special_tokens(tokenizer))).render(
        [*_ANSWERED, {"role": "user", "content": _NEXT}], None, json.loads(kwargs)
    )
    after = tokenizer.encode(text.partition(_SAID)[2].partition(_NEXT)[0])
    return next((index for index in after if index in tokenizer.stop_ids), tokenizer.eos_id)


def check_special(text: str, rendered: object, tokenizer: Tokenizer) -> None:
    """Refuse a conversation of whose special tokens, written by its template, sentencepiece would make letters.

    Args:
        text: The conversation, rendered.
        rendered: Messages, tools and variables, as JSON. What they say of such tokens themselves are letters.
        tokenizer: What will encode the text.

    Raises:
        DataError: Names the token, and how to make a tokenizer that knows it.
    """
    if not isinstance(tokenizer, PieceTokenizer):
        return
    for piece in _spelled(tokenizer):
        if piece in text and text.count(piece) > json.dumps(rendered, ensure_ascii=False).count(piece):
            raise DataError(
                f"tokenizer {tokenizer.path}: the chat template writes {piece}, of which sentencepiece makes letters; "
                "put a tokenizer.json beside it (save_pretrained of a fast tokenizer of transformers writes one)"
            )


@functools.lru_cache(maxsize=4)
def _spelled(tokenizer: PieceTokenizer) -> tuple[str, ...]:
    """Return the special tokens whose names do not become these tokens."""
    added = tokenizer_settings(tokenizer.path.parent).get("added_tokens_decoder")
    named = map(_piece, added.values()) if isinstance(added, Mapping) else ()
    pieces = {*special_tokens(tokenizer).values(), *tokenizer.control_pieces, *(each for each in named if each)}
    return tuple(piece for piece in sorted(pieces) if not tokenizer.parses(piece))


@functools.lru_cache(maxsize=4)
def _shared(process: int, template: str, special: str) -> Chat:
    """Return one renderer for all callers in this process; a fork would write into the pipes of the other."""
    return Chat(template, json.loads(special))


class Chat(LimitedProcess):
    """A template in a process of its own.

    Args:
        template: Text of jinja.
        special: What it may name beside the messages.
    """

    def __init__(self, template: str, special: Mapping[str, str]) -> None:
        limits = str(_MEMORY_BYTES), str(int(_RENDER_S))
        super().__init__("hybridflow.data.chat_process", limits, max_answer_bytes=_MOST_ANSWER_BYTES)
        self._parses_arguments = _has_arguments_as_object(template)
        self._first = json.dumps({"template": template, "special": dict(special), "most": _MOST_CHARACTERS}).encode()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render a conversation as the text that the assistant's answer continues.

        Arguments of calls, which OpenAI's interface has as JSON in a string, become objects first, unless the template
        writes them as they are.

        Args:
            messages: With ``role`` and ``content`` each.
            tools: What the assistant may call, as the template wants it.
            kwargs: Other variables of the template, by which it may do without thinking, say.
            add_generation_prompt: Whether the text ends with what begins the assistant's answer.

        Raises:
            DataError: jinja2 is not installed, or the template refuses the conversation, fails, reaches for what is
                not its own, takes more than 5 s or 512 MiB, or makes more than 2^20 characters.
        """
        if self._parses_arguments:
            messages = [_with_parsed_arguments(each) for each in messages]
        with self._lock:
            try:
                conversation = {"messages": list(messages), "tools": tools, "kwargs": dict(kwargs or {})}
                answer = self._ask(
                    json.dumps({**conversation, "add_generation_prompt": add_generation_prompt}).encode()
                )
            except (OSError, EOFError, TimeoutError) as error:
                self.close()
                raise DataError(
                    f"the chat template was stopped, it takes more than {_RENDER_S:g} s or {_MEMORY_BYTES >> 20} MiB "
                    f"({type(error).__name__}: {error}); mend it, or send the text itself"
                ) from error
        if "error" in answer:
            raise DataError(answer["error"])
        text = str(answer["text"])
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"the chat template made half of a surrogate pair: character {error.start}; mend it"
            ) from None
        return text

    def end_of_turn(self, kwargs: Mapping[str, Any]) -> str:
        """Return what the template writes behind the assistant's text where the conversation ends with it.

        Args:
            kwargs: Other variables of the template.

        Raises:
            DataError: As for ``render``.
        """
        return self.render(_ANSWERED, None, kwargs, add_generation_prompt=False).partition(_SAID)[2]

    def _ask(self, conversation: bytes) -> dict[str, Any]:
        if not self.is_running:
            self.exchange(self._first, _START_S)
        answer: dict[str, Any] = json.loads(self.exchange(conversation, _RENDER_S))
        return answer


def read_messages(value: Any, where: str, *, with_images: bool = False) -> list[dict[str, Any]]:
    """Read the messages of a conversation from JSON; their content as text, empty where they call tools alone.

    Args:
        value: The list.
        where: What messages of errors call it.
        with_images: Content with an image stays a list of parts.

    Raises:
        DataError: It is no such list.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: found {value!r:.60}, expected a list of messages, at least one")
    return [_message(each, f"{where}[{index}]", with_images=with_images) for index, each in enumerate(value)]


def read_kwargs(value: Any, where: str) -> dict[str, Any]:
    """Read the variables of a chat template from JSON.

    Raises:
        DataError: It is no object, or names a variable that is not the caller's.
    """
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise DataError(f"{where}: found {value!r:.60}, expected an object, such as {{'enable_thinking': false}}")
    try:
        check_kwargs(value, where)
    except ConfigError as error:
        raise DataError(str(error)) from None
    return value


def _message(value: Any, where: str, *, with_images: bool) -> dict[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(f"{where}: found {value!r:.60}, expected an object with role and content")
    content = value.get("content")
    if content is None and value.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = _joined_parts(content, with_images=with_images)
    if content is None or not isinstance(content, str | list):
        types = "text or image" if with_images else "text; of messages with images give the field: data.images_field"
        raise DataError(
            f"{where}: content: found {value.get('content')!r:.60}, expected text, or a list of parts of type {types}"
        )
    # Columns of tables have a field that one message has in all of them.
    return {**{name: each for name, each in value.items() if each is not None}, "content": content}


def _joined_parts(parts: list[Any], *, with_images: bool) -> str | list[dict[str, Any]] | None:
    """Return the text of parts; the parts themselves, if images are among them; None: one is of no such type."""
    known = [as_part(each) for each in parts]
    if any(each is None or (each["type"] == "image" and not with_images) for each in known):
        return None
    found = [each for each in known if each is not None]
    return "".join(each["text"] for each in found) if all(each["type"] == "text" for each in found) else found


def _has_arguments_as_object(template: str) -> bool:
    """Return whether a template takes the arguments of a call as an object: it writes them as JSON, or one by one."""
    if not re.search(_ARGUMENTS, template):
        return _WHOLE_CALL.search(template) is not None
    names = "".join(rf"|\b{name}" for name in _NAMED.findall(template))
    return re.search(rf"(?:{_ARGUMENTS}{names}){_AS_OBJECT}", template) is not None


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_parsed_call(each) for each in calls]} if isinstance(calls, list) else message


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call


def _piece(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None
