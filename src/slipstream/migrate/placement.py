"""Where a migrated script makes its Accelerator, and how functions get it.

Rules ask for it by `need(node, ...)` and get text that is known only when all have asked. Then the function that trains, or the one that
calls all that do, makes it; functions between get it as an argument, classes as an attribute. Questions that `PartialState()` answers
need no argument. If a function is used in a way that its arguments cannot be changed, the script makes one Accelerator after its imports.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from slipstream.migrate.edits import Deferred, Rewriter
from slipstream.migrate.source import Function, Script, Unit, key_of

__all__ = ["AcceleratorPlacement"]

_MAKE: Final = "one Accelerator instead of a process group"
_PASS: Final = "who needs the Accelerator gets it"
_SAFE_DECORATORS: Final = ("no_grad", "inference_mode", "record", "enable_grad")


@dataclass
class AcceleratorPlacement:
    """Decides who makes the Accelerator, after all rules have said who needs it."""

    rewriter: Rewriter
    options: dict[str, str] = field(default_factory=dict)
    """Arguments of the Accelerator: text by name."""
    handlers: dict[str, dict[str, str]] = field(default_factory=dict)
    """Options of `kwargs_handlers`: text by class and name."""
    replaced: list[ast.stmt] = field(default_factory=list)
    """Statements whose place the creation can take, such as `init_process_group(...)`."""
    invoked: dict[ast.AST, ast.AST] = field(default_factory=dict)
    """Names of functions that stand where they are not called, but will be called by what replaces them."""
    anchor: ast.AST | None = None
    """The node whose function should make the Accelerator, such as the call of DistributedDataParallel."""
    imports: set[tuple[str, str]] = field(default_factory=set)
    _training: list[ast.AST] = field(default_factory=list)
    _questions: list[ast.AST] = field(default_factory=list)
    _texts: dict[Unit, str] = field(default_factory=dict)
    _home: Unit = None
    name: str = "accelerator"

    @property
    def script(self) -> Script:
        return self.rewriter.script

    def need(self, node: ast.AST, *, state: bool = False) -> Deferred:
        """Return the text by which the Accelerator is reached at a node; `state` means that `PartialState()` would do."""
        (self._questions if state else self._training).append(node)
        return lambda: self._text(node, state)

    def add_handler_option(self, kind: str, name: str, value: ast.expr) -> None:
        """Add an option of a handler; of two values the first is kept, and the second noted."""
        text = self.script.segment(value)
        kept = self.handlers.setdefault(kind, {}).setdefault(name, text)
        if kept != text:
            self.rewriter.note(value, f"{name}={text} was not kept: the Accelerator has one value for all models, {name}={kept}.")

    def _text(self, node: ast.AST, state: bool) -> str:
        unit = self.script.unit(node)
        if state and self.script.runs_at_definition(node):
            self.imports.add(("slipstream", "PartialState"))
            return "PartialState()"
        if unit in self._texts:
            return self._texts[unit]
        if self._texts and None in self._texts:
            return self._texts[None]
        assert state, f"nobody gives an Accelerator to line {self.script.line_of(node)}"
        self.imports.add(("slipstream", "PartialState"))
        return "PartialState()"

    def settle(self) -> None:
        """Choose the place, and add the changes that make the Accelerator and pass it on."""
        live = [node for node in self._training if not self.rewriter.is_deleted(node)]
        if not live:
            self._settle_questions()
            return
        if self.name in self.script.names():
            self.name = "slipstream_accelerator"
        needing = list(dict.fromkeys(map(self.script.unit, live)))
        home, receivers = self._choose(needing, self.anchor if self.anchor is not None else live[0])
        self._home = home
        self._texts = {unit: f"self.{self.name}" if isinstance(unit, ast.ClassDef) else self.name for unit in (*receivers, home)}
        for statement in self.replaced:
            self.rewriter.delete(statement, _MAKE)
        for unit in receivers:
            self._pass_to(unit)
        self._make(home, receivers)
        self._delete_empty_functions()
        self.imports.add(("slipstream", "Accelerator"))

    def pass_from(self, home: Unit, name: str) -> None:
        """Give a variable of `home` to all that need it, as an argument; nothing is made."""
        needing = list(dict.fromkeys(self.script.unit(node) for node in self._training if not self.rewriter.is_deleted(node)))
        self.name = name
        receivers = self._receivers(home, needing)
        if receivers is None:
            for node in self._training:
                self.rewriter.note(node, f"{name} is not known here: pass it to this function.")
        self._texts = dict.fromkeys((*needing, *(receivers or [])), name)
        self._texts |= {unit: f"self.{name}" for unit in self._texts if isinstance(unit, ast.ClassDef) and unit is not home}
        self._texts[home] = name
        for unit in receivers or []:
            self._pass_to(unit)

    def _settle_questions(self) -> None:
        for statement in self.replaced:
            if not self.rewriter.is_deleted(statement):
                self.imports.add(("slipstream", "PartialState"))
                self.rewriter.replace(statement, "PartialState()", reason=_MAKE)

    def _choose(self, needing: Sequence[Unit], anchor: ast.AST) -> tuple[Unit, list[Unit]]:
        """Return who makes the Accelerator, and who receives it."""
        home = self.script.unit(anchor)
        seen: set[Unit] = set()
        while home is not None and home not in seen:
            seen.add(home)
            receivers = self._receivers(home, needing)
            if receivers is not None and self._can_make(home):
                return home, receivers
            callers = {self.script.unit(call) for call in self._calls(home) or []} - {home}
            home = callers.pop() if len(callers) == 1 else None
        return None, []

    def _can_make(self, unit: Unit) -> bool:
        return not isinstance(unit, ast.ClassDef) or _constructor(unit) is not None

    def _receivers(self, home: Unit, needing: Iterable[Unit]) -> list[Unit] | None:
        """Return the units that get the Accelerator as an argument if `home` makes it; None if one of them cannot."""
        todo = [unit for unit in needing if unit is not home]
        found: list[Unit] = []
        while todo:
            unit = todo.pop()
            if unit in found or unit is home:
                continue
            calls = self._calls(unit) if unit is not None else None
            if not calls or not self._can_receive(unit):
                return None
            found.append(unit)
            todo += [self.script.unit(call) for call in calls]
        return found

    def _can_receive(self, unit: Unit) -> bool:
        function = _constructor(unit) if isinstance(unit, ast.ClassDef) else unit
        if function is None:
            return False
        if isinstance(unit, ast.ClassDef) and not self._uses_self(unit):
            return False
        names = {ast.unparse(decorator).split("(")[0].rpartition(".")[2] for decorator in function.decorator_list}
        return names <= set(_SAFE_DECORATORS) and not function.args.posonlyargs

    def _uses_self(self, unit: ast.ClassDef) -> bool:
        """Whether every need inside of a class stands in a method that has `self`."""
        for node in (*self._training, *self._questions):
            if self.script.unit(node) is unit:
                method = next((parent for parent in self.script.ancestors(node) if self.script.parents.get(parent) is unit), None)
                if not isinstance(method, ast.FunctionDef) or not method.args.args or method.args.args[0].arg != "self":
                    return False
        return True

    def _calls(self, unit: Unit) -> list[ast.AST] | None:
        """Return the calls of a function or class of this script; None if it is used in another way, too."""
        assert unit is not None
        calls: list[ast.AST] = []
        for node in self.script.nodes:
            if isinstance(node, ast.Name) and node.id == unit.name and isinstance(node.ctx, ast.Load):
                parent = self.script.parents[node]
                if isinstance(parent, ast.Call) and parent.func is node:
                    calls.append(parent)
                elif node in self.invoked:
                    calls.append(self.invoked[node])
                elif not self.rewriter.is_deleted(node):
                    return None
        return calls

    def _pass_to(self, unit: Unit) -> None:
        script = self.script
        function = _constructor(unit) if isinstance(unit, ast.ClassDef) else unit
        assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        arguments = function.args.args[1:] if isinstance(unit, ast.ClassDef) else function.args.args
        every = [*arguments, *([function.args.vararg] if function.args.vararg else []), *function.args.kwonlyargs]
        if isinstance(unit, ast.ClassDef):
            self._insert_argument(script.span(function.args.args[0])[1], f", {self.name}", arguments[0] if arguments else None)
            first = _first_statement(function)
            self.rewriter.insert_lines(first, [[f"self.{self.name} = {self.name}"]], _PASS)
        else:
            place = script.text.index("(", script.offset(function.lineno, function.col_offset)) + 1
            text = self.name + (", " if every or function.args.kwarg else "")
            self._insert_argument(place, text, arguments[0] if arguments else None)
        for call in self._calls(unit) or []:
            if isinstance(call, ast.Call) and call not in self.invoked.values():
                given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
                place = script.text.index("(", script.span(call.func)[1]) + 1
                text = self._texts.get(script.unit(call), self.name)
                self._insert_argument(place, text + (", " if given else ""), given[0] if given else None)

    def _insert_argument(self, place: int, text: str, following: ast.AST | None) -> None:
        """Insert an argument, on a line of its own if the next one is."""
        script = self.script
        if following is not None:
            start = script.span(following)[0]
            begin = script.line_start(start)
            if begin > place and not script.text[begin:start].strip():
                line = f"{script.text[begin:start]}{text.strip(', ')},{script.newline}"
                self.rewriter.replace_span(begin, begin, line, reason=_PASS)
                return
        self.rewriter.replace_span(place, place, text, reason=_PASS)

    def _make(self, home: Unit, receivers: Sequence[Unit]) -> None:
        target = self._texts[home]
        if isinstance(home, ast.ClassDef):
            constructor = _constructor(home)
            assert constructor is not None
            first = _first_statement(constructor)
        else:
            first = self._first_use(home, receivers)
        made = f"{target} = Accelerator({self._arguments(home, first)})"
        self.rewriter.insert_lines(first, [[made]], _MAKE)

    def _first_use(self, home: Function | None, receivers: Sequence[Unit]) -> ast.stmt:
        """Return the first statement of the body of `home` that needs the Accelerator."""
        used = [node for node in (*self._training, *self._questions, *self.replaced) if self.script.unit(node) is home]
        for unit in receivers:
            used += [call for call in self._calls(unit) or [] if self.script.unit(call) is home]
        used = [node for node in used if node in self.replaced or not self.rewriter.is_deleted(node)]
        used += self._setup_calls(home)
        body = home.body if home is not None else list(_module_body(self.script))
        if home is None:  # functions that read the global are called by module code
            used += [node for node in self.script.nodes if self._calls_user(node)]
        for statement in body:
            if any(node is statement or statement in self.script.ancestors(node) for node in used):
                return statement
        return body[-1]

    def _setup_calls(self, home: Unit) -> list[ast.AST]:
        """Return the calls, in `home`, of the functions that opened the process group."""
        units = [self.script.unit(statement) for statement in self.replaced]
        calls = [call for unit in units if unit is not None and unit is not home for call in self._calls(unit) or []]
        return [call for call in calls if self.script.unit(call) is home]

    def _delete_empty_functions(self) -> None:
        """Delete functions that did nothing but open the process group, and their calls."""
        for statement in self.replaced:
            unit = self.script.unit(statement)
            if not isinstance(unit, (ast.FunctionDef, ast.AsyncFunctionDef)) or unit is self._home:
                continue
            calls = [self.script.parents[call] for call in self._calls(unit) or []]
            rest = [inner for inner in unit.body if not (isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant))]
            if calls and all(isinstance(call, ast.Expr) for call in calls) and all(map(self.rewriter.is_emptied, rest)):
                for empty in (unit, *calls):
                    assert isinstance(empty, ast.stmt)
                    self.rewriter.delete(empty, _MAKE)

    def _calls_user(self, node: ast.AST) -> bool:
        """Whether module code calls a function or class that needs the Accelerator, itself or through others."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or self.script.unit(node) is not None:
            return False
        return node.func.id in self._users()

    def _users(self) -> set[str]:
        units = [self.script.unit(used) for used in (*self._training, *self._questions)]
        names = {unit.name for unit in units if unit is not None}
        while True:
            calls = [node for node in self.script.nodes if isinstance(node, ast.Call) and key_of(node.func) in names]
            callers = {unit.name for unit in map(self.script.unit, calls) if unit is not None}
            if callers <= names:
                return names
            names |= callers

    def _arguments(self, home: Unit, first: ast.stmt) -> str:
        given: dict[str, str] = {}
        for option, text in self.options.items():
            if _is_known(self.script, text, home, first):
                given[option] = text
            else:
                value = f"the value of `{text}`"
                self.rewriter.note(first, f"pass {option}= to Accelerator(...): {value} is not known where the Accelerator is made.")
        handlers = []
        for kind, options in self.handlers.items():
            known = {name: text for name, text in options.items() if _is_known(self.script, text, home, first)}
            for name in options.keys() - known.keys():
                self.rewriter.note(first, f"pass {kind}({name}=...) to Accelerator(kwargs_handlers=[...]): its value is not known here.")
            if known:
                handlers.append(f"{kind}({', '.join(f'{name}={text}' for name, text in known.items())})")
                self.imports.add(("slipstream.utils", kind))
        if handlers:
            given["kwargs_handlers"] = f"[{', '.join(handlers)}]"
        return ", ".join(f"{name}={text}" for name, text in given.items())


def _constructor(unit: Unit) -> ast.FunctionDef | None:
    if not isinstance(unit, ast.ClassDef):
        return None
    return next((node for node in unit.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)


def _first_statement(function: Function) -> ast.stmt:
    """Return the first statement after the docstring and a call of `super().__init__`."""
    for statement in function.body:
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        parent = isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("super().__init__")
        if not text and not parent:
            return statement
    return function.body[-1]


def _module_body(script: Script) -> Iterator[ast.stmt]:
    """Return the statements of the module, with those of `if __name__ == "__main__":` instead of itself."""
    for statement in script.tree.body:
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            yield from statement.body
        elif not isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement


def _is_known(script: Script, text: str, home: Unit, first: ast.stmt) -> bool:
    """Whether every variable of an expression has a value before a statement."""
    names = {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}
    known = set(script.imported) | set(dir(builtins))
    for node in script.nodes:
        if isinstance(node, ast.arg) and script.unit(node) is home:
            known.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and script.unit(node) in (None, home):
            if script.line_of(node) < script.line_of(first) or (script.unit(node) is None and home is not None):
                known.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known.add(node.name)
    kinds = {"FullyShardedDataParallelPlugin", "DataLoaderConfiguration"}
    return names <= known | kinds


