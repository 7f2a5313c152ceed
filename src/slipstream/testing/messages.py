"""Messages between the test process, the pool server and its ranks: frames on a socket, and pickled functions.

A frame is a small JSON header followed by bytes. The sockets are inherited pairs, never a port, so no other process can connect; that is
why the body may be a pickle, which this library otherwise never reads. Functions of test files are pickled by value, with closures and
pytest's rewritten asserts; other modules by name. A closed end raises `EOFError`.
"""

from __future__ import annotations

import importlib.util
import io
import json
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from slipstream.errors import StateError

__all__ = ["dump_on_host", "pack", "receive", "send", "unpack"]


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


def pack(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return a call as bytes.

    >>> base = 40
    >>> call, args, kwargs = unpack(pack(lambda x: base + x, (2,), {}))
    >>> call(*args, **kwargs)
    42
    """
    cloudpickle = _cloudpickle()
    with ExitStack() as stack:
        for module in _test_modules(function):
            stack.enter_context(_by_value(cloudpickle, module))
        data: bytes = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    return data


def unpack(data: bytes) -> Any:
    """Return what `pack` received, or what a rank sent back."""
    return _cloudpickle().loads(data)


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle
    except ImportError as error:
        raise StateError("the pool sends functions to other processes and needs cloudpickle: pip install 'slipstream[testing]'") from error
    module: ModuleType = cloudpickle
    return module


def _test_modules(function: Callable[..., Any]) -> Iterator[ModuleType]:
    """Yield modules whose asserts pytest has rewritten, and the function's own if a fresh interpreter cannot import it."""
    own = getattr(function, "__module__", None)
    for name, module in sys.modules.copy().items():  # a copy, because threads import
        if name == "__main__" or not isinstance(module, ModuleType):
            continue  # cloudpickle sends __main__ by value anyway
        if "@pytest_ar" in vars(module) or (name == own and not _importable(name)):
            yield module


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@contextmanager
def _by_value(cloudpickle: ModuleType, module: ModuleType) -> Iterator[None]:
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def dump_on_host(value: Any) -> bytes:
    """Return a value as a pickle whose tensors are in host memory: the process that reads it need not have their device.

    >>> import torch
    >>> unpack(dump_on_host({"loss": torch.tensor([1.5])}))
    {'loss': tensor([1.5000])}
    """
    import cloudpickle

    class HostPickler(cloudpickle.Pickler):  # type: ignore[misc] # cloudpickle has no types
        """Pickles tensors of devices as tensors of the host."""

        def reducer_override(self, obj: Any) -> Any:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
                return _same, (obj.detach().cpu(),)
            return super().reducer_override(obj)

    file = io.BytesIO()
    HostPickler(file).dump(value)
    return file.getvalue()


def _same(value: Any) -> Any:
    return value
