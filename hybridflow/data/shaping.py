"""From a row as it was read to what training draws: rendered, checked, and cut to what fits."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from hybridflow.config.data import DataConfig, DataSourceConfig
from hybridflow.data.chat import (
    KWARGS,
    Chat,
    check_special,
    read_kwargs,
    read_messages,
    special_tokens,
    turn_end_id,
)
from hybridflow.data.files import find_files
from hybridflow.data.images import image_parts, images_of
from hybridflow.data.preferences import check_imitable, encode_responses, preferences_of
from hybridflow.data.prompts import (
    RESPONSE,
    Ends,
    Example,
    encode_prompt,
    encode_solution,
    example_of,
    prompt_tokens,
    response_field,
    text_of,
    value_of,
)
from hybridflow.data.readers import cut, format_of, place_of, read
from hybridflow.data.rows import CONVERSATIONS, HERE, Row, are_messages, unknown_speaker
from hybridflow.data.tokenizer import Tokenizer, open_tokenizer
from hybridflow.data.turns import Conversation, Said, Turns
from hybridflow.errors import DataError
from hybridflow.families.images import ImageSettings

_TOOLS = "tools"
"""Field of what the assistant may call, for the chat template."""

_GRIDS = "grids of images"
"""Beside the fields of a prepared row: rows and columns of each image's tokens. So all ranks know the same of them."""

Kind = Literal["rows", "problems", "pairs", "preferences"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What rows have to be; as JSON it goes to the processes that prepare them.

    Attributes:
        data: Names the fields, and says what becomes of bad rows and long ones.
        kind: Rows of any fields; or problems; or preferences, of pairs alone or of single responses too.
        is_imitating: Whether solutions are imitated.
        needs_answer: Whether a problem needs its answer, since the reward compares with it.
        template: Text of the chat template; None: there is none.
        tokenizer: File of the tokenizer; None: nothing is counted in tokens.
        num_rows: Tokens that the model knows; None: all of the tokenizer's.
        images: How images become tokens; None: prompts are text.
        stop: ``rollout.stop``: texts and names of tokens, each of which ends a response too.
        max_new_tokens: Longest response.
        max_context: Longest sequence; None: any.
    """

    data: DataConfig
    kind: Kind
    is_imitating: bool = False
    needs_answer: bool = True
    template: str | None = None
    tokenizer: str | None = None
    num_rows: int | None = None
    images: ImageSettings | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 0
    max_context: int | None = None


class Shaped(NamedTuple):
    """A row that can be used.

    Attributes:
        row: Its fields, the prompt as text.
        begins: Whether that text has the beginning of a sequence in it.
        contents: Of what is drawn of it, one or two: what makes it another where it differs; JSON.
    """

    row: Row
    begins: bool
    contents: tuple[Any, ...]


def examples_of(row: Row, place: str, begins: bool, shape: Shape) -> tuple[Example, ...]:
    """Return the problem of a row whose prompt is text, or its preferences.

    Raises:
        DataError: It lacks a field, or has something else there than it should.
    """
    grids = row.get(_GRIDS)
    if grids is not None:
        row = {name: value for name, value in row.items() if name != _GRIDS}
    if shape.kind in ("rows", "problems"):
        found: tuple[Example, ...] = (example_of(row, place, shape.data, needs_answer=shape.needs_answer),)
    else:
        found = preferences_of(row, place, shape.data, is_paired=shape.kind == "pairs")
    if shape.images is not None and shape.data.images_field is not None:
        where = f"{place}: field {shape.data.images_field!r}"
        images = images_of(value_of(row, shape.data.images_field), where, shape.images, grids)
        found = tuple(replace(each, images=images) for each in found)
    return tuple(replace(each, begins=True) for each in found) if begins else found


def ends_of(example: Example, shape: Shape, tokenizer: Tokenizer) -> Ends:
    """Return what ends responses to an example's prompt.

    Where the chat template made the prompt, it is the template's token, else the end of sequence.

    Raises:
        DataError: The template cannot be rendered; names the row.
    """
    if not example.begins or shape.template is None:
        return Ends(stop=shape.stop)
    try:
        end_id = turn_end_id(shape.template, tokenizer, shape.data.chat_template_kwargs)
    except DataError as error:
        raise DataError(f"{example.place}: {error}") from error
    return Ends(end_id, shape.stop)


def read_examples(source: DataSourceConfig, shape: Shape) -> Generator[Example, None, None]:
    """Read the examples of files, one at a time, without a store; ``shape`` says how, also for bad rows.

    Raises:
        DataError: A file cannot be read; a row cannot be used, and ``on_bad_row`` is ``error``; there are no rows.
    """
    shaper, num_rows = Shaper(shape), 0
    try:
        most = shape.data.max_row_bytes
        for file in find_files(source.path):
            for piece in cut(file, format_of(file.path, source.file_format), max_row_bytes=most):
                for number, row in enumerate(read(piece, max_row_bytes=most)):
                    num_rows += row is not None
                    try:
                        shaped = shaped_row(row, shaper)
                    except DataError as error:
                        if shape.data.on_bad_row == "error":
                            raise DataError(str(error).replace(HERE, place_of(piece, number), 1)) from error
                        continue
                    if shaped is not None:
                        yield from examples_of(shaped.row, place_of(piece, number), shaped.begins, shape)
    finally:
        shaper.close()
    if num_rows == 0:
        raise DataError(no_rows(source.path, shape))


def no_rows(title: str, shape: Shape) -> str:
    """Return the message for a source that is empty."""
    return f"{title}: holds no rows; expected one JSON object with {shape.data.prompt_field!r} on each line"


def shaped_row(row: Row | DataError | None, shaper: Shaper) -> Shaped | None:
    """Return a reader's result, shaped; None: a blank line, or a prompt that is longer than asked for.

    Raises:
        DataError: It cannot be used; the message begins with ``HERE``.
    """
    if isinstance(row, DataError):
        raise row
    return None if row is None else shaper(row, HERE)


class Shaper:
    """Shapes one row after the other.

    Attributes:
        shape: What rows have to be.

    Args:
        shape: As the attribute.

    Raises:
        DataError: The tokenizer cannot be read.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._tokenizer: Tokenizer | None = None
        if shape.tokenizer is not None:
            self._tokenizer = open_tokenizer(shape.tokenizer, shape.num_rows)
        special = {} if self._tokenizer is None else special_tokens(self._tokenizer)
        self._chat = None if shape.template is None else Chat(shape.template, special)
        self._turns = None if self._chat is None else Turns(self._chat, self._tokenizer)

    def close(self) -> None:
        """End the process of the chat template."""
        if self._chat is not None:
            self._chat.close()

    def __call__(self, row: Row, place: str) -> Shaped | None:
        """Return a row that can be used; None: its prompt is longer than asked for.

        Raises:
            DataError: It cannot be used; the message begins with ``place``.
        """
        shape = self.shape
        row, begins = self._rendered(row, place)
        if shape.kind == "rows":
            # A program may have rows of any fields. The prompt is text.
            if value_of(row, shape.data.prompt_field) is not None:
                text_of(row, shape.data.prompt_field, place, "prompt_field")
            if shape.data.max_prompt_tokens is not None:
                prompt = text_of(row, shape.data.prompt_field, place, "prompt_field")
                if not self._is_short(Example(prompt=prompt, answer="", begins=begins, place=place)):
                    return None
            return Shaped(row, begins, (row,))
        examples = examples_of(row, place, begins, shape)
        if not self._is_short(examples[0]):
            return None
        self._check(examples)
        if examples[0].images:
            row = {**row, _GRIDS: [each.grid for each in examples[0].images]}
        return Shaped(row, begins, tuple(example.content for example in examples))

    def _is_short(self, example: Example) -> bool:
        most = self.shape.data.max_prompt_tokens
        return most is None or self._tokenizer is None or len(prompt_tokens(example, self._tokenizer)) <= most

    def _check(self, examples: tuple[Example, ...]) -> None:
        shape, tokenizer = self.shape, self._tokenizer
        if shape.is_imitating:
            for example in examples:
                check_imitable(example, shape.data)
        if tokenizer is None or shape.max_context is None:
            return
        context, ends = shape.max_context, Ends(stop=shape.stop)
        encode_prompt(examples[0], tokenizer, max_new_tokens=shape.max_new_tokens, max_context=context)
        if shape.is_imitating:
            encode_solution(examples[0], tokenizer, max_context=context, ends=ends)
        for example in examples:
            encode_responses(example, tokenizer, max_context=context, ends=ends)

    def _rendered(self, row: Row, place: str) -> tuple[Row, bool]:
        """Return the row with its conversation as text, and whether it has one."""
        data = self.shape.data
        all_said = _messages_said(row, data)
        said = {
            name: self._read(all_said[name], f"{place}: field {name!r}")
            for name in _responses_read(self.shape)
            if name in all_said
        }
        messages, last = self._asked(row, place, is_said=bool(said))
        messages, first = _continued(messages, said, place)
        if not messages:
            return row, False
        if self._turns is None:
            is_text = data.prompt_as_message and not said and isinstance(value_of(row, data.prompt_field), str)
            found = "data.prompt_as_message=true makes a message of its prompt" if is_text else "holds messages"
            remedy = "data.prompt_as_message=false" if is_text else "give the prompt as text"
            raise DataError(
                f"{place}: {found}, and the tokenizer has no chat template; set data.chat_template to a file with one, "
                f"or {remedy}"
            )
        if last is None and self.shape.kind == "problems":
            last = said.get(response_field(row, data))
        else:
            first = 0
        row, messages = self._with_images(row, messages, place)
        kwargs = {**data.chat_template_kwargs, **_kwargs_of(row, place)}
        talk = Conversation(messages, _tools_of(row, place), kwargs, place)
        prompt, learned = self._learned(row, talk, last, said, first)
        given = {} if last is None else self._given(row, last)
        answers = {
            name: _text_of(self._read(all_said[name], f"{place}: field {name!r}"))
            for name in self._answers_read({**given, **row}, all_said, messages)
        }
        return {**given, **row, data.prompt_field: prompt, **answers, **learned}, True

    def _learned(
        self, row: Row, talk: Conversation, last: Said | None, said: Mapping[str, Said], first: int
    ) -> tuple[str, dict[str, str | list[str]]]:
        """Return a row's prompt, and its fields of what is learned behind it.

        Args:
            row: Its fields.
            talk: The prompt's messages.
            last: The response to imitate; None: there is none.
            said: The responses of a preference, by their fields.
            first: Index of the first message that ``last`` may have written.
        """
        turns, data = self._turns, self.shape.data
        assert turns is not None, "_rendered refuses rows that need a template where there is none"
        prompt, learned = turns.prompt(talk), dict[str, str | list[str]]()
        is_given = value_of(row, data.solution_field) is not None and data.solution_field not in said
        if last is not None and self.shape.is_imitating and not is_given:
            whole = talk.with_last(_checked(last))
            if data.learned_turns == "all" and self.shape.kind == "problems":
                prompt, learned[data.solution_field] = turns.all(whole, first)
            else:
                learned[data.solution_field] = turns.last(whole, prompt)
        if self.shape.kind in ("pairs", "preferences"):
            learned |= {name: turns.last(talk.with_last(_checked(each)), prompt) for name, each in said.items()}
        if self._tokenizer is not None:
            texts = [prompt, *("".join(each) for each in learned.values())]
            responses = [each.messages[-1] for each in (last, *said.values()) if each is not None]
            try:
                check_special("".join(texts), [talk.messages, responses, talk.tools, talk.kwargs], self._tokenizer)
            except DataError as error:
                raise DataError(f"{talk.where}: {error}") from error
        return prompt, learned

    def _read(self, value: Any, where: str) -> Said:
        return Said(read_messages(value, where, with_images=self.shape.images is not None), where)

    def _with_images(self, row: Row, messages: list[dict[str, Any]], place: str) -> tuple[Row, list[dict[str, Any]]]:
        """Return a row with all its images in their field, and messages with a part for each."""
        name = self.shape.data.images_field
        if name is None or self.shape.images is None:
            return row, messages
        messages, sources = image_parts(messages, value_of(row, name), place)
        return ({**row, name: sources} if sources else row), messages

    def _answers_read(self, row: Row, said: Mapping[str, Any], prompt: list[dict[str, Any]]) -> list[str]:
        """Return the fields of messages of which the text alone is read; others stay as they are."""
        shape, data = self.shape, self.shape.data
        if shape.kind == "rows":
            return [name for name, value in said.items() if _only_answers(prompt, value)]
        if shape.kind == "problems" and not shape.is_imitating:
            # Without an answer, the response is what the reward compares with.
            names = [name for name in (data.answer_field, data.solution_field) if name is not None]
            is_read = all(value_of(row, name) is None for name in names)
            return [name for name in said if is_read and name == response_field(row, data)]
        if shape.kind == "problems":
            return [name for name in _responses_read(shape) if name in said and not said[name][-1].get("tool_calls")]
        return []

    def _asked(self, row: Row, place: str, *, is_said: bool) -> tuple[list[dict[str, Any]], Said | None]:
        """Return the messages of a row's own conversation up to the response, and all of them if there is one."""
        found = _conversation(row, place, self.shape.data, is_said=is_said)
        said = None if found is None else self._read(*found)
        if said is None or said.messages[-1]["role"] != "assistant":
            return [] if said is None else said.messages, None
        if len(said.messages) == 1:
            raise DataError(f"{said.where}: the assistant's message is the only one; put what it answers before it")
        return said.messages[:-1], said

    def _given(self, row: Row, last: Said) -> dict[str, str]:
        """Return the fields that a row has from the assistant's last message."""
        data = self.shape.data
        if last.messages[-1].get("tool_calls"):
            return {}
        text = _text_of(last)
        given = {data.solution_field: text}
        if data.answer_field is not None and value_of(row, data.answer_field) is None:
            given[data.answer_field] = text
        return given


def _tools_of(row: Row, place: str) -> list[Any] | None:
    """Return what the assistant may call in a row's conversation; None: nothing."""
    tools = value_of(row, _TOOLS)
    if tools is None or tools == "":
        return None
    where = f"{place}: field {_TOOLS!r}"
    tools = _parsed(tools, where)
    if tools is not None and not isinstance(tools, list):
        raise DataError(
            f"{where}: found {tools!r:.60}, expected a list of tools for the chat template; rename the field if it is "
            "for something else"
        )
    return tools


def _kwargs_of(row: Row, place: str) -> dict[str, Any]:
    """Return the variables of the chat template that a row has; without those that only other rows of a table have."""
    found = value_of(row, KWARGS)
    if found is None or found == "":
        return {}
    where = f"{place}: field {KWARGS!r}"
    kwargs = read_kwargs(_parsed(found, where), where)
    return {name: value for name, value in kwargs.items() if value is not None}


def _responses_read(shape: Shape) -> tuple[str, ...]:
    """Return the fields of responses that rows of this kind are read for."""
    data = shape.data
    if shape.kind == "rows" or (shape.kind == "problems" and not shape.is_imitating):
        return ()
    single, paired = (data.completion_field, RESPONSE), (data.chosen_field, data.rejected_field)
    return {"problems": single, "pairs": paired, "preferences": (*paired, *single)}[shape.kind]


def _messages_said(row: Row, data: DataConfig) -> dict[str, Any]:
    """Return the fields of a row's responses that hold messages."""
    names = (data.chosen_field, data.rejected_field, data.completion_field, RESPONSE)
    found = {name: value_of(row, name) for name in names}
    return {name: value for name, value in found.items() if are_messages(value)}


def _conversation(row: Row, place: str, data: DataConfig, *, is_said: bool) -> tuple[Any, str] | None:
    """Return a row's messages, with the errors' name for them; None: its prompt is text, or missing.

    Beside responses of messages (``is_said``) the text of a prompt is the user's message.
    """
    prompt = value_of(row, data.prompt_field)
    if isinstance(prompt, list):
        return prompt, f"{place}: field {data.prompt_field!r}"
    for name in (data.messages_field, CONVERSATIONS) if prompt is None else ():
        messages, where = value_of(row, name), f"{place}: field {name!r}"
        speaker = unknown_speaker(messages)
        if speaker is not None:
            raise DataError(
                f"{where}: found a turn from {speaker!r}, expected human, gpt or system; write the conversation as "
                "messages with role and content"
            )
        if messages is not None and (name == data.messages_field or are_messages(messages)):
            return _parsed(messages, where), where
    if isinstance(prompt, str) and (data.prompt_as_message or is_said):
        return [{"role": "user", "content": prompt}], f"{place}: prompt"
    return None


def _continued(prompt: list[dict[str, Any]], said: Mapping[str, Said], place: str) -> tuple[list[dict[str, Any]], int]:
    """Return the prompt's messages, and those before the last of each response, which is what the model is to write.

    A response may repeat the prompt, as TRL writes it, or go on from it with messages of the assistant and of tools.
    The number is how many of the messages are the prompt's.
    """
    found: dict[str, tuple[list[dict[str, Any]], int]] = {}
    for name, each in said.items():
        begun = each.messages[:-1]
        joined = _joined(prompt, begun)
        if joined is None:
            raise DataError(
                f"{each.where}: begins with a message of {begun[0]['role']!r}, and does not have the prompt's "
                "messages; give the conversation in one of the two, or begin the response with the assistant's message"
            )
        if joined[0]:
            found[name] = joined
    if not found:
        return prompt, len(prompt)
    (name, (messages, first)), *others = found.items()
    for other, (differing, _) in others:
        if differing != messages:
            raise DataError(
                f"{place}: fields {name!r} and {other!r} begin with different messages; give responses to one prompt"
            )
    return messages, first


def _only_answers(prompt: list[dict[str, Any]], value: Any) -> bool:
    """Return whether messages are the prompt, or nothing, and then text of the assistant, so that its text says all."""
    try:
        *begun, last = read_messages(value, HERE)
    except DataError:
        return False
    joined = _joined(prompt, begun)
    is_text = last["role"] == "assistant" and not last.get("tool_calls")
    return is_text and joined is not None and _texts(joined[0]) == _texts(prompt)


def _joined(prompt: list[dict[str, Any]], begun: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int] | None:
    """Return a prompt and the messages that a response begins with as one conversation; None: they do not fit.

    The number is how many of its messages are the prompt's.
    """
    if not begun or not prompt:
        return begun or prompt, len(prompt)
    goes_on = begun[0]["role"] == "assistant"
    # Other messages, such as instructions, may stand before the prompt where the response repeats it.
    starts = range(1 if goes_on else len(begun))
    for start in starts:
        if _texts(begun[start : start + len(prompt)]) == _texts(prompt):
            return begun, start + len(prompt)
    return ([*prompt, *begun], len(prompt)) if goes_on else None


def _texts(messages: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(each["role"], each["content"]) for each in messages]


def _parsed(value: Any, where: str) -> Any:
    """Return a value that may be given as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON: {error}; mend it, or rename the field") from error
    return value


def _checked(said: Said) -> Said:
    """Return messages whose last is the assistant's. Raises DataError: it is another's."""
    role = said.messages[-1]["role"]
    if role != "assistant":
        raise DataError(f"{said.where}: ends with a message of {role!r}; a response is what the assistant says")
    return said


def _text_of(said: Said) -> str:
    """Return what the assistant said last. Raises DataError: it is not text alone."""
    message = _checked(said).messages[-1]
    if message.get("tool_calls"):
        raise DataError(
            f"{said.where}: ends with a call of tools, of which this is not the text; give the response as text"
        )
    if not isinstance(message["content"], str):
        raise DataError(f"{said.where}: the assistant's last message has an image; what a model writes is text")
    content: str = message["content"]
    return content
