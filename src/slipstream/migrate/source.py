"""A Python script as text and as a syntax tree, with what the rules ask about it.

Positions of the tree are turned into offsets of the text, names are followed through imports (`dist.barrier` is
`torch.distributed.barrier`), and every node knows its parent. Nothing of the script is imported or run.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Final, TypeAlias

from slipstream.errors import ConfigError

__all__ = ["Function", "Key", "Script", "Unit", "key_of", "parse_script"]

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Unit: TypeAlias = Function | ast.ClassDef | None
"""Where code stands: a function or class of the module; None is the module itself."""
Key: TypeAlias = str
"""A variable as it is written: `rank`, `args.local_rank`, `self.model`."""


def key_of(node: ast.AST | None) -> Key | None:
    """Return a name or a chain of attributes as text; None for any other expression.

    >>> key_of(ast.parse("self.model").body[0].value), key_of(ast.parse("f().model").body[0].value)
    ('self.model', None)
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = key_of(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


_LINE: Final = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")


class Script:
    """The text of a script, its tree, and the meaning of its names."""

    def __init__(self, text: str, tree: ast.Module, name: str) -> None:
        self.text: Final = text
        self.tree: Final = tree
        self.name: Final = name
        self._lines: Final[list[str]] = _LINE.findall(text)  # not splitlines, which also splits at form feeds
        self._starts: Final = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self.parents: Final = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
        self.nodes: Final = list(_in_order(tree))
        self.imported: Final = dict(self._imports())
        self.newline: Final = "\r\n" if "\r\n" in text else "\n"

    def _imports(self) -> Iterator[tuple[str, str]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0], alias.name.split(".")[0])
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a position of the tree, whose columns count bytes of UTF-8."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        return self._starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the offsets at which a node begins and ends."""
        assert isinstance(node, (ast.expr, ast.stmt, ast.alias, ast.keyword, ast.arg))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        line, column = node.lineno, node.col_offset
        for decorator in getattr(node, "decorator_list", []):
            if decorator.lineno < line:
                line, column = decorator.lineno, len(self.indent(decorator))
        return self.offset(line, column), self.offset(node.end_lineno, node.end_col_offset)

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def quote_around(self, node: ast.AST) -> str | None:
        """Return the quotation mark of the f-string that a node is in; None if it is in none."""
        found = next((parent for parent in self.ancestors(node) if isinstance(parent, ast.JoinedStr)), None)
        if found is None:
            return None
        text = self.segment(found).lstrip("fFrRbBuU")
        return text[:1]

    def is_located(self, node: ast.AST) -> bool:
        """Return whether the text at a node's position is the node: before Python 3.12 positions in f-strings can be wrong."""
        try:
            return ast.dump(ast.parse(f"({self.segment(node)})", mode="eval").body) == ast.dump(node)
        except (SyntaxError, IndexError):
            return False

    def line_of(self, node: ast.AST) -> int:
        """Return the line on which a node begins."""
        return getattr(node, "lineno", 1)

    def line_start(self, offset: int) -> int:
        """Return the offset at which the line with this offset begins."""
        return self.text.rfind("\n", 0, offset) + 1

    def line_end(self, offset: int) -> int:
        """Return the offset after the end of the line with this offset, its newline included."""
        found = self.text.find("\n", offset)
        return len(self.text) if found < 0 else found + 1

    def indent(self, node: ast.AST) -> str:
        """Return the white space before a statement, as it is written."""
        line = self._lines[self.line_of(node) - 1]
        return line[: len(line) - len(line.lstrip())]

    def qualified(self, node: ast.AST) -> str | None:
        """Return the full name of what an expression refers to, through the imports; None for what was not imported."""
        key = key_of(node)
        if key is None:
            return None
        first, dot, rest = key.partition(".")
        home = self.imported.get(first)
        return None if home is None else f"{home}{dot}{rest}"

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Return the calls of functions with these full names, or of methods where a name begins with a dot."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and self.is_call(node, *names):
                yield node

    def is_call(self, node: ast.AST, *names: str) -> bool:
        """Return whether a node calls one of these."""
        if not isinstance(node, ast.Call):
            return False
        if self.qualified(node.func) in names:
            return True
        return isinstance(node.func, ast.Attribute) and f".{node.func.attr}" in names

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is in."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Return the nodes around a node, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def unit(self, node: ast.AST) -> Unit:
        """Return the function or class of the module that a node is in."""
        found: Unit = None
        for parent in (node, *self.ancestors(node)):
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found = parent
        return found

    def runs_at_definition(self, node: ast.AST) -> bool:
        """Return whether a node in a function or class is evaluated when that is defined: a decorator, a default, a line of a class."""
        inner: ast.AST = node
        for parent in self.ancestors(node):
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                in_body = inner in parent.body if isinstance(parent.body, list) else inner is parent.body
                if in_body:
                    return False
            elif isinstance(parent, ast.ClassDef):
                return True
            inner = parent
        return self.unit(node) is not None

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that a statement is in."""
        for _, value in ast.iter_fields(self.parents[statement]):
            if isinstance(value, list) and statement in value:
                return value
        raise AssertionError(f"a statement of {self.name} is in no block")

    def assignments(self) -> Iterator[tuple[Key, ast.expr, ast.stmt]]:
        """Return every `key = value`, with its statement."""
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if (key := key_of(target)) is not None:
                        yield key, node.value, node
            elif isinstance(node, ast.AnnAssign) and node.value is not None and (key := key_of(node.target)) is not None:
                yield key, node.value, node

    def names(self) -> set[str]:
        """Return every name that the script binds or reads."""
        found = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        found |= {node.arg for node in self.nodes if isinstance(node, ast.arg)}
        return found | set(self.imported)

    def lines_inside_strings(self) -> set[int]:
        """Return the lines that begin inside a string, where white space has a meaning."""
        inside: set[int] = set()
        begun: list[int] = []
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            kind = tokenize.tok_name[token.type]
            if kind == "STRING":
                inside.update(range(token.start[0] + 1, token.end[0] + 1))
            elif kind.endswith("STRING_START"):  # f-strings, from Python 3.12 on
                begun.append(token.start[0])
            elif kind.endswith("STRING_END"):
                inside.update(range(begun.pop() + 1, token.end[0] + 1))
        return inside


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes of a tree in the order of the text."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from _in_order(child)


def parse_script(text: str, name: str) -> Script:
    """Return the script with this text; a mistake of its syntax is an error with its line and column."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        place = f"line {error.lineno}, column {error.offset}"
        shown = f"\n    {error.text.strip()}" if error.text else ""
        raise ConfigError(
            f"{name} is not a script that Python {_python()} can read: {error.msg} ({place}).{shown}\n"
            "Nothing was changed. Correct it first."
        ) from None
    except ValueError as error:  # null bytes
        raise ConfigError(f"{name} is not a script: {error}.\nNothing was changed.") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be read.\nNothing was changed.") from None
    return Script(text, tree, name)


def _python() -> str:
    import sys

    return f"{sys.version_info.major}.{sys.version_info.minor}"
