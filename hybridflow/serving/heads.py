"""Strict HTTP/1.1: a request that two readers could take for two different ones is refused. The one door to h11.

A proxy in front of the server may end a request elsewhere than h11 does. What follows would then be a request that the
proxy has not checked.
"""

from __future__ import annotations

import re

import h11

_MOST_BYTES = 16 << 10
_END = re.compile(rb"\n\r?\n")
_HEAD = re.compile(rb"(?:[^\x00-\x20\x7f][^\x00-\x08\x0a-\x1f\x7f]*\r\n)+\r\n")
"""Lines that CRLF ends, without control characters, none of which continues the line before it; an empty line."""

_FRAMING = (b"content-length", b"transfer-encoding")


class StrictConnection(h11.Connection):
    """The server's side of a connection, for clients that are not trusted."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, _MOST_BYTES)

    @property
    def awaits_head(self) -> bool:
        """Return whether the head of the next request is not there, or not whole."""
        return self.their_state is h11.IDLE

    @property
    def awaits_body(self) -> bool:
        """Return whether the body of a request is not there, or not whole."""
        return self.their_state is h11.SEND_BODY

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event, as ``h11.Connection`` does.

        Raises:
            RemoteProtocolError: What came is no HTTP, or is ambiguous.
        """
        if self.awaits_head:
            content, _ = self.trailing_data
            end = _END.search(content)
            if end is not None:
                _check_head(content[: end.end()])
        event = super().next_event()
        if isinstance(event, h11.Request) and any(name == b"transfer-encoding" for name, _ in event.headers):
            # h11 takes sloppy trailers, so nothing that follows them is read.
            headers = [*event.headers, (b"connection", b"close")]
            return h11.Request(
                method=event.method, target=event.target, headers=headers, http_version=event.http_version
            )
        return event


def _check_head(head: bytes) -> None:
    """Refuse a head whose end, or whose body's end, is open to doubt.

    Raises:
        RemoteProtocolError: It is.
    """
    if len(head) > _MOST_BYTES or not _HEAD.fullmatch(head):
        raise h11.RemoteProtocolError("a long head, a control character, a folded line, or a line that LF alone ends")
    request, *fields = head[:-4].split(b"\r\n")
    parts = [field.partition(b":") for field in fields]
    lengths = [value.strip(b" \t") for name, _, value in parts if name.lower() in _FRAMING]
    if len(lengths) > 1 or any(b"," in length for length in lengths):
        raise h11.RemoteProtocolError("the length of the body is given more than once")
    if lengths not in ([], [b"0"]) and request.startswith((b"GET ", b"HEAD ")):
        raise h11.RemoteProtocolError("GET with a body")
    if not request.endswith(b" HTTP/1.1") and not all(length.isdigit() for length in lengths):
        raise h11.RemoteProtocolError("Transfer-Encoding before HTTP/1.1")
