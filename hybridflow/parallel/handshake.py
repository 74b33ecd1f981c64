"""Connections whose two ends have proved to each other that they know a key. Python's own library alone.

    caller -> listener    greeting (8 bytes), nonce (32)
    listener -> caller    nonce (32), proof (32)
    caller -> listener    proof (32)
    both ways             messages: length (4), masked text, tag (32)

A proof is HMAC-SHA256 of the role and both nonces. Masks and tags come from keys of this connection alone and from the
place of a message in it. So nothing that was recorded can be used again, and a program between the two ends can neither
read nor change a message. Before a proof, nothing that the other end sends is interpreted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_GREETING = b"hflow 1\n"
_NONCE_BYTES = _PROOF_BYTES = _TAG_BYTES = 32
_LENGTH_BYTES = 4

MOST_BYTES = 1 << 26
"""Of a message."""

MOST_STRANGERS = 64
"""So many who have proved nothing are heard at one time beside the ranks; the oldest gives way to the next."""

_STRANGER_S = 10.0
"""So long a stranger has for its proof."""

_TRY_S, _AGAIN_S = 5.0, 0.05

_WRONG_S = 3.0
"""So long a caller tries again where another program listens: an earlier start of the job may be about to end."""


class StrangerError(Exception):
    """The other end does not know the key."""


def key_for(secret: bytes, purpose: str) -> bytes:
    """Return the key of one purpose, ``[32]`` bytes; none of them tells of another or of the secret."""
    return hmac.digest(secret, purpose.encode(), "sha256")


class SealedChannel:
    """One end of a connection after the proofs: turns messages into what goes over it, and back.

    Args:
        out_key: Key of what this end sends.
        in_key: Key of what the other end sends.
    """

    def __init__(self, out_key: bytes, in_key: bytes) -> None:
        self._out_key, self._in_key = out_key, in_key
        self._num_sealed = self._num_opened = 0
        self._incoming = bytearray()

    def seal(self, message: bytes) -> bytes:
        """Return the bytes that carry a message, the next of this end.

        Raises:
            ValueError: It is larger than ``MOST_BYTES``.
        """
        if len(message) > MOST_BYTES:
            raise ValueError(f"a message of {len(message)} bytes; at most {MOST_BYTES} are sent")
        text = _mask(message, self._out_key, self._num_sealed)
        tag = _tag(text, self._out_key, self._num_sealed)
        self._num_sealed += 1
        return len(text).to_bytes(_LENGTH_BYTES, "big") + text + tag

    def open(self, data: bytes) -> list[bytes]:
        """Take bytes that have arrived, and return the messages that are now complete.

        Raises:
            ValueError: They are not what the other end sent.
        """
        self._incoming += data
        messages = []
        while len(self._incoming) >= _LENGTH_BYTES:
            size = int.from_bytes(self._incoming[:_LENGTH_BYTES], "big")
            if size > MOST_BYTES:
                raise ValueError("a message without an end")
            end = _LENGTH_BYTES + size
            if len(self._incoming) < end + _TAG_BYTES:
                break
            text, tag = bytes(self._incoming[_LENGTH_BYTES:end]), bytes(self._incoming[end : end + _TAG_BYTES])
            del self._incoming[: end + _TAG_BYTES]
            if not hmac.compare_digest(tag, _tag(text, self._in_key, self._num_opened)):
                raise ValueError("a message that the other end did not send")
            messages.append(_mask(text, self._in_key, self._num_opened))
            self._num_opened += 1
        return messages


def connect(
    address: str, port: int, key: bytes, *, limit_s: float, look: Callable[[], None] = lambda: None
) -> tuple[socket.socket, SealedChannel]:
    """Connect with the program that listens at an address and knows a key, as soon as it does.

    Args:
        address: Host.
        port: Its port.
        key: From ``key_for``.
        limit_s: Longest wait, in seconds.
        look: Called about every second; what it raises ends the wait.

    Returns:
        The connection, which blocks, and this end's channel.

    Raises:
        StrangerError: Another program listens there.
        OSError: None does.
    """
    end_s = time.monotonic() + limit_s
    wrong_s = end_s
    while True:
        look()
        try:
            return _call(address, port, key, min(_TRY_S, max(0.1, end_s - time.monotonic())))
        except StrangerError:
            wrong_s = min(wrong_s, time.monotonic() + _WRONG_S)
            if time.monotonic() + _AGAIN_S > wrong_s:
                raise
        except OSError:
            if time.monotonic() + _AGAIN_S > end_s:
                raise
        time.sleep(_AGAIN_S)


def _call(address: str, port: int, key: bytes, limit_s: float) -> tuple[socket.socket, SealedChannel]:
    end_s = time.monotonic() + limit_s
    connection = socket.create_connection((address, port), timeout=limit_s)
    try:
        # Linux may connect a socket that looks for a free port of its own machine with itself.
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(_GREETING + nonce)
        answer = _receive(connection, _NONCE_BYTES + _PROOF_BYTES, end_s)
        nonces = nonce + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(key, b"listener", nonces)):
            raise StrangerError(f"{address}:{port}")
        connection.sendall(_proof(key, b"caller", nonces))
        connection.settimeout(None)
        return connection, SealedChannel(_proof(key, b"from caller", nonces), _proof(key, b"from listener", nonces))
    except BaseException:
        connection.close()
        raise


def _receive(connection: socket.socket, num_bytes: int, end_s: float) -> bytes:
    received = b""
    while len(received) < num_bytes:
        connection.settimeout(max(0.01, end_s - time.monotonic()))
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, "what listens there closed the connection")
        received += part
    return received


@dataclass(kw_only=True, eq=False)
class _Stranger:
    connection: socket.socket
    since_s: float
    received: bytes = b""
    nonces: bytes = field(default=b"", repr=False)


class Gate:
    """The listening end: lets in who proves that it knows a key, and sends away whoever else can reach the port.

    No method of it waits. A selector finds it ready when ``admit`` has something to do.

    Args:
        listener: From ``listen``.
        key: From ``key_for``.
        num_callers: So many may come at once.
    """

    def __init__(self, listener: socket.socket, key: bytes, num_callers: int) -> None:
        listener.setblocking(False)
        self._listener, self._key = listener, key
        self._most = num_callers + MOST_STRANGERS
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return the file number, for a selector."""
        return self._selector.fileno()

    def admit(self, now_s: float) -> list[tuple[socket.socket, SealedChannel]]:
        """Return the connections that have proved themselves, with this end's channels; they do not block.

        Args:
            now_s: Time by the caller's clock.
        """
        admitted = []
        self._accept(now_s)
        for connection, stranger in list(self._strangers.items()):
            try:
                channel = self._hear(stranger)
            except BlockingIOError:
                if now_s >= stranger.since_s + _STRANGER_S:
                    self._send_away(connection)
                continue
            except (StrangerError, OSError):
                self._send_away(connection)
                continue
            if channel is not None:
                self._forget(connection)
                admitted.append((connection, channel))
        return admitted

    def _accept(self, now_s: float) -> None:
        for _ in range(self._most):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._drop_oldest()
                return
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self._strangers) >= self._most:
                self._drop_oldest()
            self._strangers[connection] = _Stranger(connection=connection, since_s=now_s)
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, stranger: _Stranger) -> SealedChannel | None:
        """Take a stranger's next bytes; return the channel once its proof is there and right."""
        wanted = _PROOF_BYTES if stranger.nonces else len(_GREETING) + _NONCE_BYTES
        part = stranger.connection.recv(wanted - len(stranger.received))
        if not part:
            raise StrangerError
        stranger.received += part
        if not stranger.nonces and not stranger.received.startswith(_GREETING[: len(stranger.received)]):
            raise StrangerError
        if len(stranger.received) < wanted:
            return None
        received, stranger.received = stranger.received, b""
        if stranger.nonces:
            if not hmac.compare_digest(received, _proof(self._key, b"caller", stranger.nonces)):
                raise StrangerError
            keys = [_proof(self._key, role, stranger.nonces) for role in (b"from listener", b"from caller")]
            return SealedChannel(*keys)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        stranger.nonces = received[len(_GREETING) :] + nonce
        # A fresh connection takes so little at once.
        stranger.connection.send(nonce + _proof(self._key, b"listener", stranger.nonces))
        return None

    def _drop_oldest(self) -> None:
        if self._strangers:
            self._send_away(next(iter(self._strangers)))

    def _send_away(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._strangers[connection]


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen where others find this machine: at that address alone if it is sure, else on every interface.

    Args:
        address: Name or address under which others look for this machine.
        port: 0: a free one, which the system chooses.

    Raises:
        OSError: The port is in use.
    """
    own = own_address(address)
    if own is not None:
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        return socket.create_server((own, port), family=family, backlog=socket.SOMAXCONN)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN)
    return socket.create_server(("", port), backlog=socket.SOMAXCONN)


def own_address(name: str) -> str | None:
    """Return the one address of this machine that a name stands for.

    None: others may find this machine elsewhere. So it is where the name has several addresses or none of this machine
    (NAT), or is only this machine's word for itself (``127.0.1.1`` in ``/etc/hosts``).
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
        (address,) = found
        if ipaddress.ip_address(address).is_loopback and address != name:
            return None
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except (OSError, ValueError):  # ValueError: more than one, or an address with a zone
        return None
    return address


def _proof(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + nonces, "sha256")


def _mask(text: bytes, key: bytes, place: int) -> bytes:
    """Hide a text, or show a hidden one: SHAKE-256 with a key is a stream of bytes that nobody else can tell."""
    stream = hashlib.shake_256(b"mask" + key + place.to_bytes(8, "big")).digest(len(text))
    return (int.from_bytes(text, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(text), "big")


def _tag(text: bytes, key: bytes, place: int) -> bytes:
    return hmac.digest(key, b"tag" + place.to_bytes(8, "big") + text, "sha256")
