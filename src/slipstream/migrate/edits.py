"""Changes of a script's text that keep everything else: comments, formatting, line ends.

A rule replaces a node by a template, deletes a statement, or inserts lines. A template may contain other nodes, whose own changes are
applied inside of it, so rules need not know of each other. Deleted statements are collected, and a block that loses its last statement
gets a `pass`, or goes with its `if`. Every change carries its reason, and what no rule can change safely becomes a note.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias

from slipstream.migrate.source import Script

__all__ = ["Deferred", "Edit", "Note", "Part", "Rewriter"]

Deferred: TypeAlias = Callable[[], str]
"""Text that is known only when all rules have run."""
Part: TypeAlias = str | ast.AST | Deferred


class Note(NamedTuple):
    """What is left to do by hand, and where."""

    line: int
    text: str


@dataclass(frozen=True)
class Edit:
    """Replace the text between two offsets."""

    start: int
    end: int
    parts: tuple[Part, ...]
    reason: str
    owner: tuple[int, int] | None = None
    """Where the node stands that this text is put around; None if it is not put around one."""
    stays: bool = False
    """The text is inserted even where everything around it is deleted."""


@dataclass
class Rewriter:
    """Collects the changes of one script."""

    script: Script
    edits: list[Edit] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    _deleted: dict[ast.stmt, str] = field(default_factory=dict)
    _removed: dict[tuple[ast.AST, ...], dict[ast.AST, str]] = field(default_factory=dict)

    def replace(self, node: ast.AST, *parts: Part, reason: str) -> None:
        """Replace a node by text and other nodes."""
        quote = self.script.quote_around(node)
        if quote is not None:
            if not self.script.is_located(node):
                self.note(node, f"change `{ast.unparse(node)}` in this text by hand: {reason}.")
                return
            other = "'" if quote == '"' else '"'
            parts = tuple(part.replace(quote, other) if isinstance(part, str) else part for part in parts)
        self.edits.append(Edit(*self.script.span(node), parts, reason))

    def replace_span(self, start: int, end: int, *parts: Part, reason: str) -> None:
        """Replace what is between two offsets."""
        self.edits.append(Edit(start, end, parts, reason))

    def insert_always(self, place: int, text: str, reason: str) -> None:
        """Insert text at an offset, also if what stands around it is deleted."""
        self.edits.append(Edit(place, place, (text,), reason, stays=True))

    def wrap(self, node: ast.AST, before: Sequence[Part], after: str, reason: str) -> None:
        """Put text around a node."""
        start, end = self.script.span(node)
        self.edits.append(Edit(start, start, tuple(before), reason, (start, end)))
        self.edits.append(Edit(end, end, (after,), reason, (start, end)))

    def insert_lines(self, statement: ast.stmt, lines: Iterable[Sequence[Part]], reason: str) -> None:
        """Insert lines before a statement, indented like it."""
        start = self.script.span(statement)[0]
        begin = self.script.line_start(start)
        before = self.script.text[begin:start]
        parts: list[Part] = []
        for line in lines:
            parts += [*line, "; "] if before.strip() else [before, *line, self.script.newline]
        place = start if before.strip() else begin
        self.edits.append(Edit(place, place, tuple(parts), reason))

    def delete(self, statement: ast.stmt, reason: str) -> None:
        """Delete a statement; the block that it is in stays valid."""
        self._deleted.setdefault(statement, reason)

    def is_deleted(self, node: ast.AST) -> bool:
        """Return whether a node is in a statement that is deleted."""
        return any(parent in self._deleted for parent in (node, *self.script.ancestors(node)))

    def is_emptied(self, statement: ast.stmt) -> bool:
        """Return whether a statement is deleted, or has nothing left in it."""
        if isinstance(statement, ast.If):
            return self.is_deleted(statement) or all(map(self.is_emptied, (*statement.body, *statement.orelse)))
        return self.is_deleted(statement)

    def is_replaced(self, node: ast.AST) -> bool:
        """Return whether exactly this node is replaced."""
        span = self.script.span(node)
        return any((edit.start, edit.end) == span for edit in self.edits)

    def is_edited(self, node: ast.AST) -> bool:
        """Return whether a part of this node is replaced."""
        start, end = self.script.span(node)
        return any(start <= edit.start < edit.end <= end for edit in self.edits)

    def note(self, node: ast.AST | int, text: str) -> None:
        """Say what has to be done by hand."""
        line = node if isinstance(node, int) else self.script.line_of(node)
        if Note(line, text) not in self.notes:
            self.notes.append(Note(line, text))

    def remove_argument(self, call: ast.Call, argument: ast.AST, reason: str) -> None:
        """Remove an argument of a call, with the comma and the space that belong to it."""
        self.remove_from(sorted((*call.args, *call.keywords), key=lambda found: self.script.span(found)[0]), argument, reason)

    def remove_from(self, items: Sequence[ast.AST], item: ast.AST, reason: str) -> None:
        """Remove an item of a list with commas."""
        self._removed.setdefault(tuple(items), {})[item] = reason

    def _removals(self) -> Iterator[Edit]:
        """Return the edits that remove items of lists: neighbours go together, so that one comma stays between the others."""
        for items, removed in self._removed.items():
            spans = [self.script.span(item) for item in items]
            flags = [(item in removed, number) for number, item in enumerate(items)]
            for gone, run in groupby(flags, lambda flag: flag[0]):
                if not gone:
                    continue
                numbers = [number for _, number in run]
                first, last = numbers[0], numbers[-1]
                reason = removed[items[first]]
                if last + 1 < len(items):
                    yield Edit(spans[first][0], spans[last + 1][0], (), reason)
                else:
                    yield Edit(spans[first - 1][1] if first else spans[first][0], spans[last][1], (), reason)

    def unwrap_block(self, statement: ast.If | ast.With, reason: str) -> None:
        """Remove the first line of an `if` or `with` and bring its block out by one level."""
        script = self.script
        first = statement.body[0]
        outer, inner = script.indent(statement), script.indent(first)
        if first.lineno == statement.lineno or not inner.startswith(outer):
            return
        start = script.line_start(script.span(statement)[0])
        self.edits.append(Edit(start, script.line_start(script.span(first)[0]), (), reason))
        strings = script.lines_inside_strings()
        extra = len(inner) - len(outer)
        assert statement.end_lineno is not None
        for line in range(first.lineno, statement.end_lineno + 1):
            begin = script.offset(line, 0)
            if line not in strings and script.text[begin : begin + len(inner)] == inner:
                self.edits.append(Edit(begin, begin + extra, (), reason))

    def indent_block(self, statements: Sequence[ast.stmt], header: Sequence[Part], reason: str) -> None:
        """Put statements of one block under a new first line, indented by one level."""
        script = self.script
        indent = script.indent(statements[0])
        step = "\t" if indent.endswith("\t") else "    "
        strings = script.lines_inside_strings()
        begin = script.line_start(script.span(statements[0])[0])
        self.edits.append(Edit(begin, begin, (indent, *header, script.newline), reason))
        last = statements[-1].end_lineno
        assert last is not None
        for line in range(statements[0].lineno, last + 1):
            start = script.offset(line, 0)
            if line not in strings and script.text[start : script.line_end(start)].strip():
                self.edits.append(Edit(start, start, (step,), reason))

    def result(self) -> tuple[str, list[Edit]]:
        """Return the changed text, and the changes that were applied, in the order of the text."""
        edits = [*self.edits, *self._removals(), *_Deletions(self.script, self._deleted).edits()]
        edits = sorted(edits, key=lambda edit: (edit.start, edit.end != edit.start, -edit.end))
        applied: list[Edit] = []
        text = self._render(0, len(self.script.text), edits, applied)
        for edit in edits:
            covered = edit in applied or any(other.start <= edit.start and edit.end <= other.end for other in applied)
            assert covered, f"two changes overlap in line {self.script.text.count(chr(10), 0, edit.start) + 1}: {edit.reason}"
        return text, applied

    def _render(self, start: int, end: int, edits: Sequence[Edit], applied: list[Edit]) -> str:
        pieces: list[str] = []
        position = start
        for edit in edits:
            if edit.start < position or edit.end > end:
                continue
            pieces.append(self.script.text[position : edit.start])
            applied.append(edit)
            others = [other for other in edits if other is not edit]
            pieces += [self._render_part(part, others, applied) for part in edit.parts]
            for other in others:
                if other.stays and edit.start < other.start < edit.end:
                    applied.append(other)
                    pieces += [self._render_part(part, [], applied) for part in other.parts]
            position = edit.end
        return "".join((*pieces, self.script.text[position:end]))

    def _render_part(self, part: Part, edits: Sequence[Edit], applied: list[Edit]) -> str:
        if isinstance(part, str):
            return part
        if isinstance(part, ast.AST):
            start, end = self.script.span(part)
            return self._render(start, end, [edit for edit in edits if _is_inside(edit, start, end)], applied)
        return part()


def _is_inside(edit: Edit, start: int, end: int) -> bool:
    first, last = edit.owner or (edit.start, edit.end)
    return start <= first and last <= end


class _Deletions:
    """Turns deleted statements into edits, from the innermost block outwards."""

    def __init__(self, script: Script, deleted: dict[ast.stmt, str]) -> None:
        self.script: Final = script
        self.deleted: Final = dict(deleted)

    def edits(self) -> list[Edit]:
        edits: list[Edit] = []
        for condition in [node for node in self.script.nodes if isinstance(node, ast.If)][::-1]:
            self._empty_if(condition, edits)
        for statement, reason in self.deleted.items():
            if any(parent in self.deleted for parent in self.script.ancestors(statement)):
                continue
            block = self.script.block(statement)
            alone = all(other in self.deleted for other in block)
            if alone and statement is block[0] and not isinstance(self.script.parents[statement], ast.Module):
                edits.append(Edit(*self.script.span(statement), ("pass",), reason))
            else:
                edits.append(self._remove(statement, reason))
        return edits

    def _empty_if(self, statement: ast.If, edits: list[Edit]) -> None:
        """An `if` without statements goes; an `else` without statements goes alone."""
        if statement in self.deleted or not _is_plain(statement.test):
            return
        reason = next((self.deleted[inner] for inner in statement.body + statement.orelse if inner in self.deleted), "")
        body_gone = all(inner in self.deleted for inner in statement.body)
        orelse_gone = all(inner in self.deleted for inner in statement.orelse)
        parent = self.script.parents[statement]
        is_elif = isinstance(parent, ast.If) and parent.orelse == [statement] and self.script.segment(statement).startswith("elif")
        if body_gone and orelse_gone and not is_elif:
            self.deleted[statement] = reason
        elif statement.orelse and orelse_gone and not isinstance(statement.orelse[0], ast.If):
            start = self.script.line_end(self.script.span(statement.body[-1])[1])
            end = self.script.line_end(self.script.span(statement.orelse[-1])[1])
            edits.append(Edit(start, end, (), reason))
            for inner in statement.orelse:
                del self.deleted[inner]

    def _remove(self, statement: ast.stmt, reason: str) -> Edit:
        text = self.script.text
        start, end = self.script.span(statement)
        line_start, line_end = self.script.line_start(start), self.script.line_end(end)
        rest = text[end:line_end].strip()
        if text[line_start:start].strip() or (rest and not rest.startswith("#")):
            return Edit(start, end, ("pass",), reason)
        blank_before = self._blank_lines(line_start, -1)
        if not line_start and text[line_end:].lstrip().startswith(("import ", "from ")):
            blank_before = len(text)  # nothing stays blank at the top
        for _ in range(min(blank_before, self._blank_lines(line_end, 1))):
            line_end = self.script.line_end(line_end)
        return Edit(line_start, line_end, (), reason)

    def _blank_lines(self, offset: int, direction: int) -> int:
        """Return how many blank lines end (-1) or begin (1) at an offset."""
        lines = self.script.text[:offset].splitlines()[::-1] if direction < 0 else self.script.text[offset:].splitlines()
        return next((number for number, line in enumerate(lines) if line.strip()), 0)


def _is_plain(test: ast.expr) -> bool:
    """Whether evaluating a condition has no effect: no call except questions such as `torch.cuda.is_available()`."""
    for node in ast.walk(test):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if not name.startswith(("is_", "get_", "has", "isinstance", "device_count", "getenv", "get", "int", "len")):
                return False
        elif isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield)):
            return False
    return True
