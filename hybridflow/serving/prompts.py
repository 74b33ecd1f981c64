"""Prompts of a file, as data files are read. A line that is no prompt is kept with what is wrong with it. No torch."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hybridflow.data.chat import KWARGS, chat_template, read_kwargs, read_messages, render_chat
from hybridflow.data.files import File
from hybridflow.data.images import Image, image_parts, images_of, with_images
from hybridflow.data.prompts import value_of
from hybridflow.data.readers import cut, format_of, place_of, read
from hybridflow.data.rows import CONVERSATIONS, HERE, Row, are_messages
from hybridflow.data.tokenizer import Tokenizer, start_of
from hybridflow.errors import ContextError, DataError
from hybridflow.families.images import ImageSettings
from hybridflow.foreign import open_regular
from hybridflow.serving.options import Options, check_ids, check_together, is_int, read_options

HDF5_SUFFIXES = (".h5", ".hdf5")
_FORMS = ("prompt", "prompt_ids", "messages")
_MOST_ROW_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A line of a file of prompts.

    Attributes:
        prompt_index: Its number in the file, counted from 0, blank lines not counted.
        place: File and line, for messages.
        fields: All that the line has, for the output.
        options: Sampling parameters of its own.
        error: What is wrong with it; None: nothing.
    """

    prompt_index: int
    place: str
    fields: dict[str, Any] = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    error: str | None = None


class Encoded(NamedTuple):
    """What the model is given.

    Attributes:
        ids: Token ids; those of images are ``data.images`` ids of the row with the number of the prompt.
        images: The images, in their order.
    """

    ids: list[int]
    images: tuple[Image, ...] = ()


def read_prompts(path: Path, field_name: str = "prompt") -> tuple[list[Prompt], str]:
    """Return the prompts of a file, and the sha256 of what they were read from.

    Args:
        path: The file.
        field_name: The field that is ``prompt`` here; ``outer.inner`` names a field of a field.

    Raises:
        DataError: It cannot be read, or holds no line.
    """
    hasher, prompts = hashlib.sha256(), []
    try:
        for prompt_index, (place, row) in enumerate(_rows(path, field_name)):
            hasher.update(f"{row}\n".encode("utf-8", "surrogatepass"))
            prompts.append(_of_row(prompt_index, place, row))
    except OSError as error:
        raise DataError(f"--prompts {path}: cannot be read: {error.strerror or error}") from error
    if not prompts:
        raise DataError(f"--prompts {path}: holds no prompts; expected one JSON object on each line")
    return prompts, hasher.hexdigest()


def _rows(path: Path, field_name: str) -> Iterator[tuple[str, Row | DataError]]:
    """Yield the rows of a file, each with its place."""
    if path.suffix in HDF5_SUFFIXES:
        from hybridflow.data.arrays import read_texts

        yield from (
            (f"{path}: prompt {index}", {"prompt": text}) for index, text in enumerate(read_texts(path, field_name))
        )
        return
    if not path.is_dir():
        # Who reads the file later would speak of a recipe.
        open_regular(path).close()
    file = File(os.fspath(path), path.stat().st_size, version="")
    for piece in cut(file, format_of(file.path, None), max_row_bytes=_MOST_ROW_BYTES):
        for index, row in enumerate(read(piece, max_row_bytes=_MOST_ROW_BYTES)):
            if row is not None:
                yield place_of(piece, index), row if isinstance(row, DataError) else _renamed(row, field_name)


def _renamed(row: Row, field_name: str) -> Row:
    """Return the row with the field as its ``prompt``."""
    value = value_of(row, field_name)
    return row if field_name == "prompt" or value is None else {**row, "prompt": value}


def encode_prompt(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_context: int,
    kwargs: Mapping[str, Any],
    images_field: str | None = None,
    settings: ImageSettings | None = None,
) -> Encoded:
    """Return a prompt's tokens and images.

    A text follows the beginning of a sequence where the tokenizer has one; tokens stay as they are.

    Args:
        prompt: The prompt.
        tokenizer: Of the model; None: there is none.
        vocab_size: Of the model.
        max_context: Of the model; a text that cannot fit is not encoded.
        kwargs: Variables of the chat template, of which a prompt may have others.
        images_field: Names the field of its images; None: prompts are text.
        settings: How images become tokens; None: prompts are text.

    Raises:
        DataError: It needs a tokenizer and there is none; it has no tokens, or some that the model has not; an image
            cannot be read, or has no place.
    """
    check_together(prompt.options, vocab_size, "sampling")
    fields = prompt.fields
    sources = None if images_field is None else value_of(fields, images_field)
    if "prompt_ids" in fields:
        ids = list(fields["prompt_ids"])
    elif tokenizer is None:
        raise DataError("the model's directory has no tokenizer; give prompt_ids, or --tokenizer")
    elif "messages" in fields or not isinstance(fields["prompt"], str):
        messages = _asked(fields["messages"]) if "messages" in fields else fields["prompt"]
        kwargs = {**kwargs, **read_kwargs(fields.get(KWARGS, {}), KWARGS)}
        ids, sources = encode_chat(messages, tokenizer, max_context, fields.get("tools"), kwargs, sources)
    else:
        ids = encode_text(fields["prompt"], tokenizer, max_context)
    if not ids:
        raise DataError("the prompt has no tokens; give at least one")
    check_ids(ids, vocab_size, "prompt")
    if sources and settings is None:
        raise DataError("messages: have images; --images-field images gives them to a model that reads images")
    images = images_of(sources, "images", settings) if sources and settings is not None else ()
    return Encoded(with_images(ids, images, prompt.prompt_index, "the prompt") if images else ids, images)


def _asked(messages: Any) -> Any:
    """Return a conversation without the assistant's last message: of a row of data it is the answer."""
    is_answered = are_messages(messages) and len(messages) > 1 and messages[-1]["role"] == "assistant"
    return messages[:-1] if is_answered else messages


def encode_text(text: str, tokenizer: Tokenizer, max_context: int) -> list[int]:
    """Return a text's tokens, after the beginning of a sequence where the tokenizer has one.

    Raises:
        DataError: It has half of a surrogate pair.
        ContextError: It is too long for the context.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"the prompt has half of a surrogate pair at character {error.start}; mend it") from error
    return [*start_of(tokenizer), *_encoded(text, tokenizer, max_context)]


def encode_chat(
    messages: Any,
    tokenizer: Tokenizer,
    max_context: int,
    tools: Sequence[Any] | None,
    kwargs: Mapping[str, Any],
    given: Any = None,
) -> tuple[list[int], list[Any]]:
    """Return a conversation's tokens, of which each image has one, and where its images are.

    The chat template decides about the beginning of a sequence.

    Args:
        messages: As JSON has them.
        tokenizer: With a template.
        max_context: Of the model.
        tools: What the assistant may call, as the template wants it.
        kwargs: Other variables of the template.
        given: Images beside the messages: a list, or one; None: the messages have all.

    Raises:
        DataError: The tokenizer has no template, or the messages are not for it.
        ContextError: They are too long for the context.
    """
    template = chat_template(tokenizer)
    if template is None:
        raise DataError(
            f"the tokenizer {tokenizer.path} has no chat_template, so it takes no messages; give the text as a prompt"
        )
    read, sources = image_parts(read_messages(messages, "messages", with_images=True), given, "messages")
    text = render_chat(template, tokenizer, read, tools, kwargs)
    return _encoded(text, tokenizer, max_context), sources


def _encoded(text: str, tokenizer: Tokenizer, max_context: int) -> list[int]:
    if len(text) > max_context:
        most = max_context * _longest_piece(tokenizer)  # type: ignore[arg-type]  # each is hashed as itself
        if len(text) > most:
            raise ContextError(
                f"the prompt has {len(text)} characters, the context {max_context} tokens, which have at most {most}; "
                "shorten the prompt"
            )
    return tokenizer.encode(text)


@functools.lru_cache(maxsize=1)
def _longest_piece(tokenizer: Tokenizer) -> int:
    return max(map(len, tokenizer.pieces().values()))


def _of_row(prompt_index: int, place: str, row: Row | DataError) -> Prompt:
    prompt = Prompt(prompt_index=prompt_index, place=place)
    if isinstance(row, DataError):
        return replace(prompt, error=str(row).removeprefix(f"{HERE}: "))
    try:
        json.dumps(row, allow_nan=False)
    except ValueError:
        return replace(prompt, error="has a number that is not finite, which JSON cannot have")
    if are_messages(row.get(CONVERSATIONS)) and not row.keys() & {*_FORMS}:
        row = {**row, "messages": row[CONVERSATIONS]}
    return _checked(replace(prompt, fields=row))


def _checked(prompt: Prompt) -> Prompt:
    """Return the prompt with its sampling parameters, or with its error."""
    try:
        return replace(prompt, options=_options(prompt.fields))
    except DataError as error:
        return replace(prompt, error=str(error))


def _options(fields: dict[str, Any]) -> Options:
    given = [name for name in _FORMS if name in fields]
    if len(given) != 1:
        there = "" if given else f" (found {', '.join(fields) or 'no field'}), or name its field with --prompt-field"
        raise DataError(f"found {' and '.join(given) or 'none'} of {', '.join(_FORMS)}; give one of them{there}")
    value = fields[given[0]]
    if given[0] == "prompt" and not (value and isinstance(value, str)) and not are_messages(value):
        raise DataError(f"prompt: found {value!r:.60}, expected a text that is not empty, or a list of messages")
    if given[0] == "prompt_ids" and not (isinstance(value, list) and value and all(map(is_int, value))):
        raise DataError(f"prompt_ids: found {value!r:.60}, expected a list of token ids, at least one")
    sampling = fields.get("sampling", {})
    if not isinstance(sampling, dict):
        raise DataError(f"sampling: found {sampling!r:.60}, expected an object of sampling parameters")
    return read_options(sampling, "sampling")


def deal(lengths: Iterable[int], num_replicas: int) -> list[list[int]]:
    """Return the places of each replica's prompts, dealt in turn from the longest, so that the work is even.

    Every replica keeps the order of the file, in which prompts that begin alike are often neighbours.

    Args:
        lengths: Tokens that each prompt may come to, with all its samples.
        num_replicas: Replicas.
    """
    taken: list[list[int]] = [[] for _ in range(num_replicas)]
    for turn, (_, place) in enumerate(sorted((-length, place) for place, length in enumerate(lengths))):
        taken[turn % num_replicas].append(place)
    return [sorted(places) for places in taken]
