"""Frames between the test process, the server and its ranks: a small JSON header, then bytes.

The two ends are a socket pair made by us and inherited, never a port, so nobody else can speak on it. That is why the body may be
a pickle (functions and results of a test), which this library otherwise never reads. A closed end is an `EOFError`.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

__all__ = ["receive", "send"]

_LENGTHS = struct.Struct(">QQ")


def send(channel: socket.socket, header: dict[str, Any], body: bytes = b"") -> None:
    """Write one frame.

    >>> here, there = socket.socketpair()
    >>> send(here, {"kind": "value"}, b"42")
    >>> receive(there)
    ({'kind': 'value'}, b'42')
    >>> here.close()
    >>> receive(there)
    Traceback (most recent call last):
    EOFError: the other end of the channel is closed
    >>> there.close()
    """
    head = json.dumps(header).encode()
    channel.sendall(_LENGTHS.pack(len(head), len(body)) + head + body)


def receive(channel: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Read one frame; the channel's own timeout holds for each piece."""
    head_length, body_length = _LENGTHS.unpack(_exactly(channel, _LENGTHS.size))
    header: dict[str, Any] = json.loads(_exactly(channel, head_length))
    return header, _exactly(channel, body_length)


def _exactly(channel: socket.socket, length: int) -> bytes:
    parts = bytearray(length)
    view, filled = memoryview(parts), 0
    while filled < length:
        count = channel.recv_into(view[filled:])
        if count == 0:
            raise EOFError("the other end of the channel is closed")
        filled += count
    return bytes(parts)
