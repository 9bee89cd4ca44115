"""A TCP proxy on loopback that makes a network or a server fail on purpose."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Literal

Fault = Literal["reset", "unavailable", "cut", "flip", "hold", "cut_reply", "flip_reply", "stall_reply"]
_OF_REPLIES: dict[str, Literal["cut", "flip", "stall"]] = {
    "cut_reply": "cut", "flip_reply": "flip", "stall_reply": "stall",
}  # fmt: skip
_BUSY = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_EXPIRED = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"""
_RESET = struct.pack("ii", 1, 0)


class FaultyProxy:
    """Passes connections on to a server; the next ones that `fail` names get a fault instead.

    "reset": closed with RST at once. "unavailable": answered with HTTP 503. "cut": reset after `after_bytes` of the
    request were passed on. "flip": one bit of the byte after so many is changed. "hold": nothing passes until
    `release()`. "cut_reply", "flip_reply": the same to the answer; "stall_reply": it stops after so many bytes until
    `release()`.

    Attributes:
        port: where it listens on 127.0.0.1.
        fired: how many connections got a fault; a test asserts it.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.fired = 0
        self.bytes_per_second: float | None = None
        self._expired: set[bytes] = set()
        self._lock = threading.Lock()
        self._fault: Fault = "reset"
        self._left = 0
        self._after_bytes = 0
        self._swallows = False
        self._released = threading.Event()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fail(self, fault: Fault, *, connections: int = 1, after_bytes: int = 0) -> None:
        """The next `connections` get this fault; those that are open already are closed, so that a next one comes."""
        with self._lock:
            self._fault, self._left, self._after_bytes = fault, connections, after_bytes
            self._released.clear()
        self._cut_all()

    def expire(self, key: str) -> None:
        """From now on, S3 requests signed with this access key are told that their token has expired."""
        with self._lock:
            self._expired.add(f"Credential={key}/".encode())
        self._cut_all()

    def _cut_all(self) -> None:
        with self._lock:
            for link in self._open:
                with contextlib.suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        self._released.set()

    def swallow(self) -> None:
        """From now on nothing that comes over open connections is passed on, and nothing is closed."""
        self._swallows = True

    def close(self) -> None:
        self._listener.close()
        self.release()
        self._cut_all()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _next_fault(self) -> Fault | None:
        with self._lock:
            if self._left == 0:
                return None
            self._left -= 1
            self.fired += 1
            return self._fault

    def _serve(self, link: socket.socket) -> None:
        fault = self._next_fault()
        with link, contextlib.suppress(OSError):  # either side may be gone by now
            if fault == "reset":
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                return
            if fault == "unavailable":
                link.recv(65536)
                link.sendall(_BUSY)
                return
            if fault == "hold":
                self._released.wait()
            first = self._first(link)
            if first is None:
                return
            with socket.create_connection(self._target) as server:
                with self._lock:
                    self._open |= {link, server}
                of_reply = _OF_REPLIES.get(fault or "")
                back = threading.Thread(target=self._pass, args=(server, link, of_reply), daemon=True)
                back.start()
                server.sendall(first)
                self._pass(link, server, fault)
                back.join()
                with self._lock:
                    self._open -= {link, server}

    def _first(self, link: socket.socket) -> bytes | None:
        """The beginning of what is asked; None where that is answered here already. Nothing where no key expired."""
        if not self._expired:
            return b""
        asked = b""
        while b"\r\n\r\n" not in asked:
            part = link.recv(65536)
            if not part:
                return None
            asked += part
        if not any(key in asked for key in self._expired):
            return asked
        with self._lock:
            self.fired += 1
        head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(_EXPIRED)}\r\nConnection: close\r\n\r\n"
        link.sendall(head.encode() + (b"" if asked.startswith(b"HEAD") else _EXPIRED))
        return None

    def _pass(self, source: socket.socket, target: socket.socket, fault: str | None = None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while content := bytearray(source.recv(65536)):
                if self._swallows:
                    continue
                if fault == "flip" and passed <= self._after_bytes < passed + len(content):
                    content[self._after_bytes - passed] ^= 1
                if self.bytes_per_second is not None:
                    time.sleep(len(content) / self.bytes_per_second)
                if fault == "stall" and passed + len(content) > self._after_bytes:
                    self._released.wait()
                target.sendall(content)
                passed += len(content)
                if fault == "cut" and passed >= self._after_bytes:
                    source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    source.shutdown(socket.SHUT_RDWR)
                    break
            if not self._swallows:
                target.shutdown(socket.SHUT_WR)
