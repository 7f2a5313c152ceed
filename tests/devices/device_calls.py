"""Collects from source the calls that are made to device namespaces, and binds their arguments to signatures.

Nothing is imported to collect: the syntax tree shows every branch. `collect` returns calls and complaints; a complaint is a call that
cannot be followed (a computed name, `*arguments`), which the source has to write differently. `bind` says why a call does not fit.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILY = "<family>"
"""Stands for the namespace of whichever family the code runs on."""

_TORCH_ROOTS = frozenset({
    "Event", "Generator", "Stream", "accelerator", "amp", "autocast", "get_autocast_dtype", "get_device_module", "is_autocast_enabled",
})
"""What of `torch` itself has to do with devices, besides `torch.<family>` and `torch.backends.<family>`."""

_TORCH_FUNCTIONS = frozenset({
    "torch.autograd.graph.save_on_cpu", "torch.distributed.init_process_group", "torch.distributed.is_xccl_available",
    "torch.distributed.new_group", "torch.distributed.device_mesh.init_device_mesh", "torch.random.fork_rng",
})

_METHODS: Mapping[str, str] = {
    "record_event": "torch.Stream", "wait_event": "torch.Stream", "wait_stream": "torch.Stream", "elapsed_time": "torch.Event",
    "record_stream": "torch.Tensor",
}
_EVENT_METHODS = frozenset({"record", "query", "synchronize"})
"""Methods with everyday names: they count on receivers that are called an event."""

_HANDED_ON = "(handed on)"
"""The arguments of a function that is not called where it is named."""

_HANDLES: Mapping[str, str] = {
    "self._runtime": "torch_xla.runtime", "self._model": "torch_xla.core.xla_model", "package": "torch_xla",
    "experimental": "habana_frameworks.torch.utils.experimental",
}
"""Names under which the device table holds modules of vendors."""


@dataclass(frozen=True, order=True)
class DeviceCall:
    """One call, with its arguments as they are written. `[device]` is passed where the devices of a family have numbers."""

    file: str
    target: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.file} | {self.target} | {self.arguments}"

    @property
    def function(self) -> str:
        """The name of the function in its namespace."""
        return self.target.rpartition(".")[2]

    @property
    def namespace(self) -> str:
        return self.target.rpartition(".")[0]


def parse_record(text: str) -> list[DeviceCall]:
    """Return the calls of a recorded list: one per line, in three columns; `#` begins a comment."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [DeviceCall(*(cell.strip() for cell in line.split("|", 2))) for line in lines]


def collect(path: str, text: str, families: frozenset[str]) -> tuple[list[DeviceCall], list[str]]:
    """Return the device calls of a file and what in it cannot be followed."""
    reader = _Reader(path, families)
    reader.visit(ast.parse(text))
    return sorted(set(reader.calls)), reader.complaints


def collect_tree(root: Path, families: frozenset[str]) -> tuple[list[DeviceCall], list[str]]:
    """Return the same for every file below a folder."""
    calls: list[DeviceCall] = []
    complaints: list[str] = []
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if path.startswith("testing/standin/"):  # a device, not a caller of devices
            continue
        found, unclear = collect(path, file.read_text(), families)
        calls += found
        complaints += unclear
    return sorted(calls), complaints


class _Reader(ast.NodeVisitor):
    def __init__(self, path: str, families: frozenset[str]) -> None:
        self.path = path
        self.families = families
        self.calls: list[DeviceCall] = []
        self.complaints: list[str] = []
        self._modules = {"torch": "torch"}  # what names of this file mean
        self._called: set[int] = set()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == "torch":
                self._modules[alias.asname or "torch"] = alias.name if alias.asname else "torch"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module is not None and node.module.partition(".")[0] == "torch":
            self._modules.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        bases = [base for base in map(self._dotted, node.bases) if self._is_device_function(base)]
        if bases:  # to make one is to make one of torch's
            self._modules[node.name] = bases[0]
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function: ast.expr = node.func
        part = function
        while isinstance(part, ast.Attribute):  # the parts of a called name are no uses of their own
            self._called.add(id(part))
            part = part.value
        if isinstance(function, ast.Attribute):
            self._method(node, function)
        elif isinstance(function, ast.Call) and _is_getattr_of_namespace(function):
            name = function.args[1] if len(function.args) > 1 else None
            if isinstance(name, ast.Constant):
                self._add(node, f"{FAMILY}.{name.value}", node.args)
        elif isinstance(function, ast.Name) and self._is_device_function(self._modules.get(function.id, "")):
            self._add(node, self._modules[function.id], node.args)
        if _is_getattr_of_namespace(node) and not (len(node.args) > 1 and isinstance(node.args[1], ast.Constant)):
            self._complain(node, "takes a function of a device namespace by a computed name; name it literally")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name, handle = self._dotted(node), ast.unparse(node).partition(".")[0]
        if id(node) in self._called:
            self.generic_visit(node)
        elif self._is_table() and handle == "package":
            self.calls.append(DeviceCall(self.path, _HANDLES[handle] + ast.unparse(node).removeprefix(handle), _HANDED_ON))
        elif self._is_device_function(name) and name.split(".")[1] in self.families | {"accelerator"}:
            self.calls.append(DeviceCall(self.path, name, _HANDED_ON))
        else:
            self.generic_visit(node)

    def _method(self, node: ast.Call, function: ast.Attribute) -> None:
        receiver, name = ast.unparse(function.value), function.attr
        dotted = self._dotted(function)
        if name == "ask" and (receiver != "self" or self._is_table()):
            self._ask(node, receiver)
        elif name == "module" and receiver != "self" and not self._is_table():
            self._complain(node, f"{receiver}.module() lets a device namespace out of the table; write {receiver}.ask(...)")
        elif name == "has" and receiver.endswith("family"):
            self._literal(node, receiver)
        elif receiver == "namespace" and self._is_table():
            self._add(node, f"{FAMILY}.{name}", node.args)
        elif receiver in _HANDLES and self._is_table():
            self._add(node, f"{_HANDLES[receiver]}.{name}", node.args)
        elif self._is_device_function(dotted):
            if node.args or node.keywords or dotted != "torch.Generator":  # without arguments it is one of the host
                self._add(node, dotted, node.args)
        elif name in _METHODS:
            self._add(node, f"{_METHODS[name]}.{name}", node.args)
        elif name in _EVENT_METHODS and "event" in receiver.lower():
            self._add(node, f"torch.Event.{name}", node.args)

    def _ask(self, node: ast.Call, receiver: str) -> None:
        name = self._literal(node, receiver)
        if name is None:
            return
        of_one = [family for family in self.families if receiver in (f"family_of('{family}')", f"table.family_of('{family}')")]
        given = [*node.args[1:]]
        keywords = {keyword.arg for keyword in node.keywords}
        if "device" in keywords:
            given.append(ast.List([ast.Name("device")]))
        if unknown := keywords - {"device", "default"}:
            self._complain(node, f"{receiver}.ask({name!r}) has the unknown keyword {', '.join(sorted(map(str, unknown)))}")
        self._add(ast.copy_location(ast.Call(node.func, given, []), node), f"{of_one[0] if of_one else FAMILY}.{name}", given)

    def _literal(self, node: ast.Call, receiver: str) -> str | None:
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return first.value
        self._complain(node, f"asks {receiver} for a function by a computed name; name it literally")
        return None

    def _add(self, node: ast.Call, target: str, positional: list[ast.expr]) -> None:
        if any(isinstance(argument, ast.Starred) for argument in positional):
            self._complain(node, f"passes *arguments to {target}; write them out")
            return
        written = [ast.unparse(argument) for argument in positional]
        written += [f"{word.arg}={ast.unparse(word.value)}" if word.arg else f"**{ast.unparse(word.value)}" for word in node.keywords]
        self.calls.append(DeviceCall(self.path, target, ", ".join(written)))

    def _complain(self, node: ast.AST, text: str) -> None:
        self.complaints.append(f"{self.path}:{getattr(node, 'lineno', '?')}: {text}")

    def _is_table(self) -> bool:
        return self.path in ("devices/table.py", "devices/lazy_runtime.py")

    def _dotted(self, node: ast.expr) -> str:
        """Return the full name of an attribute below a module of torch; "" for anything else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self._modules:
            return ".".join([self._modules[node.id], *reversed(parts)])
        if isinstance(node, ast.Call) and ast.unparse(node) == "importlib.import_module('torch')":
            return ".".join(["torch", *reversed(parts)])
        return ""

    def _is_device_function(self, dotted: str) -> bool:
        package, first, second, *_ = [*dotted.split("."), "", ""]
        if package != "torch":
            return False
        return dotted in _TORCH_FUNCTIONS or first in self.families | _TORCH_ROOTS or (first == "backends" and second in self.families)


def _is_getattr_of_namespace(node: ast.Call) -> bool:
    is_getattr = isinstance(node.func, ast.Name) and node.func.id == "getattr" and bool(node.args)
    return is_getattr and ast.unparse(node.args[0]) in ("namespace", "self._namespace", "self.module()", "family.module()") and not (
        isinstance(node.args[1], ast.Name) and node.args[1].id == "function"  # `Family.ask` itself
    )


# --- signatures ------------------------------------------------------------------------------------------------------------------


def bind(call: DeviceCall, function: Callable[..., Any], *, indexed: bool = True) -> str | None:
    """Return why the arguments of a call do not fit a function; None if they fit."""
    positional, keywords, complete = _arguments(call, indexed)
    signature = signature_of(function)
    try:
        (signature.bind if complete else signature.bind_partial)(*positional, **keywords)
    except TypeError as error:
        return f"{call.target}({', '.join([*positional, *keywords])}) does not fit {call.function}{signature}: {error}"
    return None


def _arguments(call: DeviceCall, indexed: bool) -> tuple[list[str], dict[str, str], bool]:
    node = ast.parse(f"f({call.arguments})", mode="eval").body
    assert isinstance(node, ast.Call)
    positional = [ast.unparse(argument) for argument in node.args]
    if positional and positional[-1] == "[device]":
        positional = [*positional[:-1], "device"] if indexed else positional[:-1]
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    return positional, keywords, all(keyword.arg is not None for keyword in node.keywords)


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function; for functions of torch in C++, the one that its documentation begins with."""
    try:
        return inspect.signature(function)
    except ValueError:
        return _documented_signature(function)


_UNDOCUMENTED: Mapping[str, str] = {
    # Called with these on torch 2.13.
    "Generator": "(device=None)", "get_autocast_dtype": "(device_type)", "is_autocast_enabled": "(device_type=None)",
    "record_event": "(self, event=None)",
}


def _documented_signature(function: Callable[..., Any]) -> inspect.Signature:
    name = function.__name__
    lines: Iterator[str] = (line.strip() for line in (function.__doc__ or "").splitlines())
    first = next((line for line in lines if line), "")
    text = _UNDOCUMENTED.get(name) or first.partition("->")[0].strip()
    inside = text[text.index("(") + 1 : text.rindex(")")]
    is_method = hasattr(function, "__objclass__") and not inside.startswith("self")
    scope: dict[str, Any] = {}
    # Keyword-only arguments without a value are optional in such texts.
    before, star, after = inside.partition("*, ")
    after = ", ".join(part if "=" in part else f"{part}=None" for part in after.split(", ")) if star else ""
    exec(f"def {name}({'self, ' if is_method and inside else 'self' if is_method else ''}{before}{star}{after}): ...", scope)  # noqa: S102
    return inspect.signature(scope[name])


# --- the record -------------------------------------------------------------------------------------------------------------------

HERE = Path(__file__).parent
TREES: Mapping[str, Path] = {
    "device_calls.txt": HERE.parents[1] / "src/slipstream",
    "device_calls_drop_in.txt": HERE.parents[1] / "compat/src/accelerate",
}
_HEAD = """\
# The calls to device namespaces: file | call | arguments as they are written. `python tests/devices/device_calls.py` writes this file.
# <family> is the namespace of the device family in use; [device] is passed where its devices have numbers. test_device_calls.py compares.

"""


def write_records(families: frozenset[str]) -> None:
    """Write down the calls as they are now. Read the difference before you keep it."""
    for name, root in TREES.items():
        calls, _ = collect_tree(root, families)
        (HERE / name).write_text(_HEAD + "".join(f"{str(call).rstrip()}\n" for call in calls))


if __name__ == "__main__":
    from slipstream.devices.table import family_types

    write_records(frozenset(family_types()) | {"mtia"})
