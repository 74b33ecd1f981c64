"""The process in which a chat template runs: the one door to ``jinja2``. It has little else of hybridflow.

    python -m hybridflow.data.chat_process MEMORY_BYTES RENDER_S

The first message on its standard input is the template, each further one a conversation; each is answered. A message is
a line of JSON. It ends when its input does.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import sys
from typing import Any, BinaryIO

from hybridflow.foreign import limit_cpu, limit_process

_MOST_REASON = 500


def main() -> int:
    """Answer until the input ends."""
    memory_bytes, render_s = int(sys.argv[1]), int(sys.argv[2])
    source, target = sys.stdin.buffer, sys.stdout.buffer
    limit_process(memory_bytes)
    first = _receive(source)
    if first is None:
        return 0
    # The package is slow to come where the machine is busy, which is no fault of the template.
    with contextlib.suppress(ImportError):
        importlib.import_module("jinja2.sandbox")
    _send(target, {})
    template: Any = None
    while (conversation := _receive(source)) is not None:
        limit_cpu(2 * render_s)
        try:
            if template is None:
                template = _compiled(first["template"])
            chosen = {**first["special"], **conversation.pop("kwargs")}
            text = template.render(**chosen, **conversation)
            answer = {"text": text}
            if len(text) > first["most"]:
                answer = {"error": f"the chat template made {len(text)} characters, more than {first['most']}"}
        except _Refused as error:
            answer = {"error": f"the chat template refuses the messages: {error}"}
        except ImportError:
            answer = {
                "error": "a conversation needs the package jinja2, which is not installed; pip install jinja2, or send "
                "the text"
            }
        # A template may do whatever a small program can do wrong.
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:_MOST_REASON]}"
            answer = {"error": f"the chat template fails: {reason}; mend it, or send the text itself"}
        _send(target, answer)
    return 0


class _Refused(Exception):
    """What a template raises by ``raise_exception``."""


def _compiled(template: str) -> Any:
    """Return a template with what ``transformers`` gives it."""
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what an assistant has said; here it is text like any other."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _refuse(message: object) -> None:
    raise _Refused(str(message)[:_MOST_REASON])


def _receive(source: BinaryIO) -> Any:
    line = source.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def _send(target: BinaryIO, answer: dict[str, Any]) -> None:
    target.write(json.dumps(answer).encode() + b"\n")
    target.flush()


if __name__ == "__main__":
    sys.exit(main())
