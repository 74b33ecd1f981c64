"""Turns of the assistant as the chat template writes them: text to learn, and what stands before and between.

A turn is the difference of two texts: the conversation up to the turn, with what begins the assistant's answer, and the
conversation up to and including the turn. So the policy learns what the template would read back, behind the prompt
that it has when it is asked.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hybridflow.data.chat import Chat
from hybridflow.data.pieces import PieceTokenizer
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message for what the assistant thought before it spoke."""
_SHOWN = 40


class Said(NamedTuple):
    """Messages of a field whose last is a response.

    Attributes:
        messages: At least one.
        where: What messages of errors call the field.
    """

    messages: list[dict[str, Any]]
    where: str


class Conversation(NamedTuple):
    """What a chat template is given.

    Attributes:
        messages: With ``role`` and ``content`` each.
        tools: What the assistant may call.
        kwargs: Other variables of the template.
        where: What messages of errors call the field.
        num_own: How many of the messages, the last ones, the field has.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: list[Any] | None
    kwargs: Mapping[str, Any]
    where: str
    num_own: int = 0

    def with_last(self, said: Said) -> Conversation:
        """Return the conversation with a response behind it."""
        messages = [*self.messages, said.messages[-1]]
        return self._replace(messages=messages, where=said.where, num_own=len(said.messages))

    def name(self, index: int) -> str:
        """Return what messages of errors call a message."""
        return f"{self.where}[{index - len(self.messages) + self.num_own}]"


class Turns:
    """Finds the text of turns.

    Args:
        chat: The template.
        tokenizer: Gives the tokens that end a response; None: it is yet to be trained, and has no such text.
    """

    def __init__(self, chat: Chat, tokenizer: Tokenizer | None) -> None:
        self._chat, self._tokenizer = chat, tokenizer
        self._after: dict[str, str] = {}

    @functools.cached_property
    def _kept(self) -> dict[str, int]:
        return {} if self._tokenizer is None else _ends_of(self._tokenizer)

    def prompt(self, talk: Conversation) -> str:
        """Return the text that the assistant's next message continues. Raises DataError: as ``Chat.render``."""
        return self._rendered(talk, len(talk.messages), is_open=True)

    def last(self, talk: Conversation, prompt: str) -> str:
        """Return what the assistant writes in the last message, up to the token that ends its turn.

        Where the template ends a turn with no token that ends a response, this end is left out.

        Args:
            talk: The conversation.
            prompt: ``prompt`` of the messages before the last.

        Raises:
            DataError: The template does not go on from the prompt, or leaves out a part of the message.
        """
        return self._turn(talk, len(talk.messages) - 1, prompt)

    def all(self, talk: Conversation, first: int) -> tuple[str, list[str]]:
        """Return a prompt, and the texts behind it: what the assistant writes, what it is told, and so on.

        Args:
            talk: The conversation; its last message is of the assistant.
            first: Index of the first message whose text may be written.

        Raises:
            DataError: As ``last``; a turn reads otherwise once others follow, or ends with no token that ends a
                response.
        """
        indices = [
            index for index, each in enumerate(talk.messages) if each["role"] == "assistant" and index >= max(first, 1)
        ]
        _refuse_images(talk, indices[0])
        prompts = [self._rendered(talk, index, is_open=True) for index in indices]
        written = [self._turn(talk, *each) for each in zip(indices, prompts, strict=True)]
        begun = [prompt + text for prompt, text in zip(prompts, written, strict=True)]
        texts: list[str] = []
        for number, following in enumerate(prompts[1:]):
            changed = next((each for each in range(number + 1) if not following.startswith(begun[each])), None)
            if changed is not None:
                raise DataError(
                    f"{talk.name(indices[changed])}: the chat template writes this message otherwise once others "
                    f"follow: {_difference(begun[changed], following)}, so not all turns can be learned as one text; "
                    "set data.learned_turns=last and give each turn a row of its own, or set data.chat_template to a "
                    "file whose template writes a message alike wherever it stands"
                )
            between = following[len(begun[number]) :]
            end = self._end(written[number], between)
            if end is None:
                raise DataError(
                    f"{talk.name(indices[number])}: the chat template ends this turn with no token that ends a "
                    f"response, so the policy would not learn to stop; found {between!r:.{_SHOWN}} behind it, expected "
                    f"one of {[*self._kept]}; name its token in eos_token_id of generation_config.json beside the "
                    "tokenizer, or set data.learned_turns=last"
                )
            texts += [written[number] + end, between[len(end) :]]
        return prompts[0], [*texts, written[-1]]

    def _turn(self, talk: Conversation, index: int, prompt: str) -> str:
        message, where = talk.messages[index], talk.name(index)
        whole = self._rendered(talk, index + 1, is_open=False)
        if not whole.startswith(prompt):
            raise DataError(
                f"{where}: the chat template does not go on with this message from what it begins it with: "
                f"{_difference(prompt, whole)}; give the response as text in the field of the solution, or set "
                "data.chat_template to a file whose template does"
            )
        text = self._cut(whole[len(prompt) :], talk.kwargs)
        said = _said(message, where)
        if any(_squeezed(each) not in _squeezed(text) for _, each in said):
            # A template may begin the turn with some of it, such as <think>.
            before = self._rendered(talk, index, is_open=False)
            turn = _squeezed(whole[len(os.path.commonprefix([before, whole])) :])
            lost = [name for name, each in said if _squeezed(each) not in turn]
            if lost:
                raise DataError(
                    f"{where}: has {lost[0]}, which the chat template does not write as it is, so that it would not be "
                    "learned; name the field as the template does, remove it, or give the response as text in the "
                    "field of the solution"
                )
        return text

    def _cut(self, text: str, kwargs: Mapping[str, Any]) -> str:
        """Return what a template writes of a turn up to the token that ends it."""
        key = json.dumps(kwargs, sort_keys=True)
        if key not in self._after:
            self._after[key] = self._chat.end_of_turn(kwargs)
        after = self._after[key]
        if text.endswith(after):
            # Behind what ends the turn a template may write what ends the whole conversation.
            num_said = len(text) - len(after)
            ends = ((num_said + after.find(name), name) for name in self._kept if name in after)
            at, name = min(ends, default=(num_said, ""))
        else:
            # A call of tools may end otherwise than text.
            ends = ((text.rfind(name), name) for name in self._kept if name in text)
            at, name = max(ends, default=(len(text), ""))
        return text[: at + self._kept.get(name, 0)]

    def _end(self, text: str, between: str) -> str | None:
        """Return the token that ends a turn and that its text lacks, since the next message begins with it.

        Empty: the text has one; None: there is none.
        """
        names = tuple(name for name, kept in self._kept.items() if kept)
        return "" if text.endswith(names) else next((name for name in names if between.startswith(name)), None)

    def _rendered(self, talk: Conversation, num_messages: int, *, is_open: bool) -> str:
        try:
            return self._chat.render(
                talk.messages[:num_messages], talk.tools, talk.kwargs, add_generation_prompt=is_open
            )
        except DataError as error:
            raise DataError(f"{talk.where}: {error}") from error


def _ends_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the names of the tokens that end a response -> how many letters of it a text may have.

    A name that would become letters is left out of the text. What encodes the text adds the token.
    """
    pieces = tokenizer.pieces()
    names = [pieces[index] for index in tokenizer.stop_ids if index in pieces]
    is_parsed = tokenizer.parses if isinstance(tokenizer, PieceTokenizer) else bool
    return {name: len(name) if is_parsed(name) else 0 for name in names}


def _said(message: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """Return all that a message says, with names for it."""
    if not isinstance(message["content"], str):
        raise DataError(f"{where}: the assistant's message has an image; what a model writes is text")
    calls = message.get("tool_calls")
    functions = [each.get("function", each) for each in calls if isinstance(each, Mapping)] if calls else []
    named = [each.get("name") for each in functions if isinstance(each, Mapping)]
    return [
        ("'content'", message["content"]),
        *((repr(name), each) for name in _REASONING if isinstance(each := message.get(name), str)),
        *((f"a call of the tool {name!r}", name) for name in named if isinstance(name, str)),
    ]


def _refuse_images(talk: Conversation, first: int) -> None:
    """Refuse images from a message on, since images are for prompts."""
    for index in range(first, len(talk.messages)):
        if not isinstance(talk.messages[index]["content"], str):
            raise DataError(
                f"{talk.name(index)}: has an image behind a turn that is learned; images are for prompts, set "
                "data.learned_turns=last"
            )


def _squeezed(text: str) -> str:
    """Return a text without white space, which templates strip and add."""
    return "".join(text.split())


def _difference(expected: str, found: str) -> str:
    at = max(len(os.path.commonprefix([expected, found])) - _SHOWN // 2, 0)
    return f"expected {expected[at : at + _SHOWN]!r}, found {found[at : at + _SHOWN]!r}"
