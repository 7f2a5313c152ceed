"""Disassemble a pickle into records: what it would call with what, and nothing of it is run.

Threat model: the pickle is written by an attacker, and it is a program that may call anything. So the program is only disassembled: a
name stays a `PickledName`, a call stays a `PickledCall`, and nothing that it names is imported, called, compared or hashed. Work and
memory are proportional to its length, which is limited. `pickle_reader.py` makes values of records, `dcp_metadata.py` reads them as the
table of contents of a checkpoint. Without torch.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from slipstream.errors import CheckpointError

__all__ = ["DICT", "FROZENSET", "NotPlainError", "PickledCall", "PickledName", "SET", "STORAGE", "disassemble"]


# Names of calls that the pickle makes by an instruction.
DICT = "dict"
SET = "set"
FROZENSET = "frozenset"
STORAGE = "storage"

_LARGEST = 64 * 2**20
_SHORTEST_RECORD = 3  # bytes: a pickler notes every list, mapping and object that it makes for later use, in two bytes at least
_MARK: Final = object()


class NotPlainError(CheckpointError):
    """A pickle with more than data; reading it would need to run it."""


@dataclass(frozen=True)
class PickledName:
    """A name in a module, as the file gives it; it is never looked up."""

    path: str


@dataclass(eq=False, slots=True)
class PickledCall:
    """A call that the pickle would make, and the state and items that it would put into the result."""

    path: str
    arguments: Any = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    """Pairs of a mapping, members of a list or set."""


def disassemble(data: bytes, where: str, largest: int = _LARGEST) -> Any:
    """Return the tree of records that this pickle describes; `where` is its path, for messages.

    >>> disassemble(b"cos\\nsystem\\n(S'true'\\ntR.", "a pickle")
    PickledCall(path='os.system', arguments=('true',), state=None, items=[])
    """
    if len(data) > largest:
        raise NotPlainError(f"{where} has {len(data):,} bytes of pickle beside its tensors; as data, at most {largest:,} are read")
    machine = _PickleStack(where, len(data) // _SHORTEST_RECORD + 16)
    try:
        for operation, argument, _ in pickletools.genops(data):
            action = _ACTIONS.get(operation.name)
            if action is None:
                raise NotPlainError(f"{where} uses the instruction {operation.name} of pickle, which is not read as data")
            action(machine, argument)
    # Damaged pickles end in one of these: an empty stack, an unknown memo entry, an invalid number.
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as problem:
        raise CheckpointError(f"{where} is damaged: its pickle cannot be read ({type(problem).__name__}: {str(problem)[:200]})") from None
    return machine.result()


class _PickleStack:
    """The stack and the memo of the pickle program."""

    def __init__(self, where: str, most_records: int) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._where = where
        self._records_left = most_records

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_record(self, record: Any) -> None:
        self._records_left -= 1
        if self._records_left < 0:
            raise NotPlainError(f"{self._where} makes more objects than a pickle of its length has room for")
        self.stack.append(record)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value should be")
        return value

    def since_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("no mark")
        values = self.stack[place + 1 :]
        del self.stack[place:]
        return values

    def last(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def top(self) -> Any:
        if self.stack[-1] is _MARK:
            raise ValueError("a mark where a value should be")
        return self.stack[-1]

    def memoize(self, place: int | None = None) -> None:
        self._memo[len(self._memo) if place is None else place] = self.top()

    def recall(self, place: int) -> None:
        self.stack.append(self._memo[place])

    def extend(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is list:
            target.extend(values)
        elif type(target) is PickledCall:
            target.items.extend(values)
        else:
            raise ValueError(f"members for a {type(target).__name__}")

    def set_items(self, values: list[Any]) -> None:
        target = self.top()
        if type(target) is not PickledCall or len(values) % 2:
            raise ValueError(f"items for a {type(target).__name__}")
        target.items.extend(zip(values[::2], values[1::2], strict=True))

    def call(self, what: Any, arguments: Any) -> None:
        # The callee may be the result of another call, which is unknown here.
        path = f"a {type(what).__name__}"
        if type(what) is PickledName or type(what) is PickledCall:
            path = what.path if type(what) is PickledName else f"the result of {what.path}"
        if type(arguments) is not tuple:
            raise ValueError(f"arguments in a {type(arguments).__name__}")
        self.push_record(PickledCall(path, arguments))

    def build(self, state: Any) -> None:
        target = self.top()
        if type(target) is not PickledCall or target.state is not None:
            raise ValueError(f"a state for a {type(target).__name__}")
        target.state = state

    def result(self) -> Any:
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            raise CheckpointError(f"{self._where} is damaged: its pickle leaves {len(self.stack)} values instead of one")
        return self.stack[0]


def _pairs(values: list[Any]) -> PickledCall:
    if len(values) % 2:
        raise ValueError("a key without a value")
    return PickledCall(DICT, items=list(zip(values[::2], values[1::2], strict=True)))


def _tuple_of(count: int) -> Callable[[_PickleStack, Any], None]:
    return lambda machine, _: machine.push_record(tuple(machine.last(count)))


def _name(machine: _PickleStack, argument: str) -> None:
    module, _, name = argument.partition(" ")
    machine.push_record(PickledName(f"{module}.{name}"))


def _stack_name(machine: _PickleStack, argument: Any) -> None:
    module, name = machine.last(2)
    if type(module) is not str or type(name) is not str:
        raise ValueError("a name that is no text")
    machine.push_record(PickledName(f"{module}.{name}"))


def _reduce(machine: _PickleStack, argument: Any) -> None:
    machine.call(*machine.last(2))


def _new_with_keywords(machine: _PickleStack, argument: Any) -> None:
    what, arguments, keywords = machine.last(3)
    machine.call(what, (arguments, keywords))


def _old_object(machine: _PickleStack, argument: Any) -> None:
    what, *arguments = machine.since_mark()
    machine.call(what, tuple(arguments))


def _old_instance(machine: _PickleStack, argument: str) -> None:
    machine.call(PickledName(argument.replace(" ", ".", 1)), tuple(machine.since_mark()))


def _storage(machine: _PickleStack, argument: Any) -> None:
    machine.push_record(PickledCall(STORAGE, machine.pop()))


_LITERALS: Final = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
)  # fmt: skip
_ACTIONS: Final[Mapping[str, Callable[[_PickleStack, Any], object]]] = MappingProxyType(
    {
        **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
        **dict.fromkeys(_LITERALS, _PickleStack.push),
        "NONE": lambda machine, _: machine.push(None),
        "NEWTRUE": lambda machine, _: machine.push(True),
        "NEWFALSE": lambda machine, _: machine.push(False),
        "MARK": lambda machine, _: machine.push(_MARK),
        "POP": lambda machine, _: machine.stack.pop(),
        "POP_MARK": lambda machine, _: machine.since_mark(),
        "DUP": lambda machine, _: machine.push(machine.top()),
        "PUT": lambda machine, place: machine.memoize(int(place)),
        "BINPUT": lambda machine, place: machine.memoize(place),
        "LONG_BINPUT": lambda machine, place: machine.memoize(place),
        "MEMOIZE": lambda machine, _: machine.memoize(),
        "GET": lambda machine, place: machine.recall(int(place)),
        "BINGET": lambda machine, place: machine.recall(place),
        "LONG_BINGET": lambda machine, place: machine.recall(place),
        "EMPTY_TUPLE": lambda machine, _: machine.push(()),
        "TUPLE": lambda machine, _: machine.push_record(tuple(machine.since_mark())),
        "TUPLE1": _tuple_of(1),
        "TUPLE2": _tuple_of(2),
        "TUPLE3": _tuple_of(3),
        "EMPTY_LIST": lambda machine, _: machine.push_record([]),
        "LIST": lambda machine, _: machine.push_record(machine.since_mark()),
        "APPEND": lambda machine, _: machine.extend(machine.last(1)),
        "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
        "EMPTY_DICT": lambda machine, _: machine.push_record(PickledCall(DICT)),
        "DICT": lambda machine, _: machine.push_record(_pairs(machine.since_mark())),
        "SETITEM": lambda machine, _: machine.set_items(machine.last(2)),
        "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
        "EMPTY_SET": lambda machine, _: machine.push_record(PickledCall(SET)),
        "ADDITEMS": lambda machine, _: machine.extend(machine.since_mark()),
        "FROZENSET": lambda machine, _: machine.push_record(PickledCall(FROZENSET, items=machine.since_mark())),
        "GLOBAL": _name,
        "STACK_GLOBAL": _stack_name,
        "REDUCE": _reduce,
        "NEWOBJ": _reduce,
        "NEWOBJ_EX": _new_with_keywords,
        "OBJ": _old_object,
        "INST": _old_instance,
        "BUILD": lambda machine, _: machine.build(machine.pop()),
        "BINPERSID": _storage,
    }
)
"""The effect of each supported pickle instruction on the stack. Instructions that reach outside the pickle are not supported."""
