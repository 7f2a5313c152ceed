"""Notebooks: the code cells of an .ipynb file as one script, and the changed script back in the cells.

Cells are joined, so that a name that one cell imports is known in the others. Lines for IPython (`%magic`, `!command`) are comments
meanwhile. Only the sources of changed cells are written; outputs, metadata and the format of the file stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from slipstream.errors import ConfigError
from slipstream.migrate.edits import Note
from slipstream.migrate.migration import Migration

__all__ = ["migrate_notebook"]

_MAGIC: Final = re.compile(r"^(\s*)([%!?]|[\w.]+\?{1,2}$)")
_HIDDEN: Final = "#ipython# "
_BORDER: Final = "# ---- cell {} ----\n"


def migrate_notebook(text: str, name: str, migrate: Callable[[str, str], Migration]) -> Migration:
    """Return the migration of a notebook, of which `diff()` shows the code cells."""
    notebook = _parse(text, name)
    cells = [cell for cell in notebook["cells"] if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    joined = "".join(_BORDER.format(number) + _hide(_source(cell)) for number, cell in enumerate(cells, 1))
    migration = migrate(joined, name)
    new = text
    if migration.is_changed:
        for cell, source in zip(cells, _split(migration.new), strict=True):
            if source != _hide(_source(cell)):
                _set_source(cell, _show(source))
        indent = re.search(r"\n( +)\"", text)
        new = json.dumps(notebook, indent=len(indent[1]) if indent else 1, ensure_ascii=False) + ("\n" if text.endswith("\n") else "")
    notes = [Note(note.line, f"{_place(joined, note.line)}: {note.text}") for note in migration.notes]
    return replace(migration, written=new, old=_show(migration.old), new=_show(migration.new), notes=notes)


def _place(joined: str, line: int) -> str:
    """Return the cell of a line of the joined cells, and the line in it."""
    borders = [number for number, text in enumerate(joined.splitlines(), 1) if text.startswith("# ---- cell ") and number <= line]
    return f"code cell {len(borders)}, line {line - borders[-1]}"


def _parse(text: str, name: str) -> Any:
    try:
        notebook = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not a notebook: {error}.\nNothing was changed.") from None
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ConfigError(f"{name} is not a notebook of version 4: it has no cells.\nNothing was changed. Save it with a newer Jupyter.")
    return notebook


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    text = "".join(source) if isinstance(source, list) else str(source)
    return text if text.endswith("\n") or not text else f"{text}\n"


def _set_source(cell: dict[str, Any], text: str) -> None:
    was_list = isinstance(cell.get("source"), list)
    text = text.removesuffix("\n")
    cell["source"] = text.splitlines(keepends=True) if was_list else text


def _hide(source: str) -> str:
    """Turn lines that only IPython understands into comments; all lines of a cell with a `%%` magic."""
    if source.lstrip().startswith("%%"):
        return "".join(_HIDDEN + line for line in source.splitlines(keepends=True))
    return "".join(_MAGIC.sub(rf"\1{_HIDDEN}\2", line, count=1) for line in source.splitlines(keepends=True))


def _show(source: str) -> str:
    return source.replace(_HIDDEN, "")


def _split(joined: str) -> list[str]:
    return re.split(r"^# ---- cell \d+ ----\n", joined, flags=re.MULTILINE)[1:]
