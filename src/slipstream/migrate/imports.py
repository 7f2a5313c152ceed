"""Imports of a changed script: those that the changes need, and those that nothing uses any more."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Final

from slipstream.migrate.edits import Rewriter
from slipstream.migrate.source import Script

__all__ = ["add_imports", "drop_unused_imports"]

_ADDED: Final = "new imports"
_DROPPED: Final = "unused imports"


def add_imports(rewriter: Rewriter, names: Iterable[tuple[str, str]]) -> None:
    """Import names (module, name) after the first block of imports; an empty name imports the module."""
    script = rewriter.script
    by_module: dict[str, list[str]] = {}
    for module, name in sorted(names):
        if script.imported.get(name or module) != (f"{module}.{name}" if name else module):
            by_module.setdefault(module, []).append(name)
    lines = [f"from {module} import {', '.join(found)}" if found != [""] else f"import {module}" for module, found in by_module.items()]
    if lines:
        place, after = _place(script)
        text = "".join(f"{line}{script.newline}" for line in lines)
        rewriter.insert_always(place, text if after else f"{text}{script.newline}{script.newline}", _ADDED)


def _place(script: Script) -> tuple[int, bool]:
    """Return the offset for new imports, and whether it follows other imports."""
    last: ast.stmt | None = None
    for statement in script.tree.body:
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            last = statement
        elif not text and last is not None:
            break
        elif not text:
            return script.line_start(script.span(statement)[0]), False
    return (script.line_end(script.span(last)[1]), True) if last is not None else (len(script.text), False)


def drop_unused_imports(rewriter: Rewriter) -> None:
    """Remove imports that the script used, and that the changed script does not use."""
    script = rewriter.script
    before, after = _used(script.tree), _used(ast.parse(rewriter.result()[0]))
    gone = before - after
    for node in script.nodes:
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or rewriter.is_replaced(node):
            continue
        names = [alias for alias in node.names if not rewriter.is_edited(alias)]
        dropped = [alias for alias in names if (alias.asname or alias.name.split(".")[0]) in gone]
        idle = [alias for alias in names if isinstance(node, ast.Import) and not alias.asname and alias not in dropped]
        for alias in idle:  # `import torch.distributed` binds torch; what it is for may be gone nevertheless
            if _is_idle(script, rewriter, alias.name):
                if _is_bound_elsewhere(script, node, alias):
                    dropped.append(alias)
                else:
                    rewriter.replace(alias, alias.name.split(".")[0], reason=_DROPPED)
        if len(dropped) == len(node.names):
            rewriter.delete(node, _DROPPED)
        else:
            for alias in dropped:
                rewriter.remove_from(node.names, alias, _DROPPED)


def _is_bound_elsewhere(script: Script, node: ast.stmt, alias: ast.alias) -> bool:
    """Whether another import of the module binds the first name of a dotted import, too."""
    first = alias.name.split(".")[0]
    others = [other for other in script.tree.body if isinstance(other, ast.Import) and other is not node]
    return any(name.name == first and not name.asname for other in others for name in other.names)


def _used(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return names | {text for text in texts if text.isidentifier()}


def _is_idle(script: Script, rewriter: Rewriter, module: str) -> bool:
    """Whether a module that is reached through its parent, such as torch.distributed, was used and is not used any more."""
    if "." not in module or not module.startswith(("torch.distributed", "torch.multiprocessing", "torch.nn.parallel", "deepspeed")):
        return False
    new = rewriter.result()[0]
    return f"{module}." in script.text and f"{module}." not in new.replace(f"import {module}", "")
