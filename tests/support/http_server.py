"""A server on loopback that answers what a test says, or hangs, or hangs up."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """A server on loopback.

    Args:
        answer: ``(what was asked, how often this path was asked before) -> (status, headers, body)``; it may also
            return None to hang up without a word, after it waited in ``hang`` perhaps.
        owned_by: Whose the listed model is.
    """

    def __init__(self, answer, owned_by="vllm"):
        self.asked, self.headers, self.paths, self.connections = [], [], [], 0
        self.closing = threading.Event()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                with outer._lock:
                    outer.connections += 1

            def do_GET(self):
                self.reply(200, {}, json.dumps({"data": [{"id": "tiny", "owned_by": owned_by}]}).encode())

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    outer.asked.append(asked)
                    outer.headers.append(dict(self.headers))
                    outer.paths.append(self.path)
                    number = len(outer.asked) - 1
                found = answer(asked, number)
                if found is None:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                else:
                    self.reply(*found)

            def reply(self, status, headers, body):
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def hang(self):
        """No answer until the end."""
        self.closing.wait(60)

    def close(self):
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
