"""Scripts with hand-written distributed training: how they are recognised, and the order of the rules."""

from __future__ import annotations

import ast
from typing import Final

from slipstream.migrate.edits import Rewriter
from slipstream.migrate.imports import add_imports, drop_unused_imports
from slipstream.migrate.placement import AcceleratorPlacement
from slipstream.migrate.process_rules import GROUP_MODULES, ProcessRules
from slipstream.migrate.source import Script
from slipstream.migrate.training_rules import WRAPPERS, TrainingRules

__all__ = ["finish", "rewrite_ddp", "uses_ddp"]

_SIGNS: Final = (
    *(f"{module}.init_process_group" for module in GROUP_MODULES),
    *WRAPPERS,
    "torch.multiprocessing.spawn",
    "torch.utils.data.distributed.DistributedSampler",
    "torch.utils.data.DistributedSampler",
)
_RANK_NAMES: Final = ("local_rank", "rank", "world_size", "gpu", "gpu_id", "global_rank", "device_id")


def uses_ddp(script: Script) -> bool:
    """Return whether a script starts or uses a process group by hand."""
    if any(True for _ in script.calls(*_SIGNS)) or any(name in GROUP_MODULES for name in script.imported.values()):
        return True
    called = (script.qualified(node.func) or "" for node in script.nodes if isinstance(node, ast.Call))
    return any(name.rpartition(".")[0] in GROUP_MODULES for name in called)


def rewrite_ddp(rewriter: Rewriter) -> None:
    """Add the changes that move hand-written distributed training to Slipstream."""
    script = rewriter.script
    placement = AcceleratorPlacement(rewriter)
    if not any(True for _ in script.calls(*_SIGNS)) and any(name.startswith("slipstream") for name in script.imported.values()):
        for call in script.calls(*(f"{module}.{name}" for module in GROUP_MODULES for name in ("new_group", "send", "recv", "scatter"))):
            rewriter.note(call, "this call of torch.distributed stays as it is, and works on several processes only.")
        return
    training = TrainingRules(rewriter, placement)
    ProcessRules(rewriter, placement).apply()
    training.apply()
    placement.settle()
    finish(rewriter, placement)


def _drop_unused_ranks(rewriter: Rewriter, new: ast.Module) -> None:
    """Delete variables of functions that only held a rank for calls that are gone."""
    script = rewriter.script
    for key, value, statement in script.assignments():
        unit = script.unit(statement)
        if "." in key or unit is None or not rewriter.is_replaced(value) or not any(found == key for found in _RANK_NAMES):
            continue
        if any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in ast.walk(unit)):
            continue
        after = [node for node in ast.walk(new) if isinstance(node, type(unit)) and node.name == unit.name]
        reads = [found for node in after for found in ast.walk(node) if isinstance(found, ast.Name) and found.id == key]
        if after and not any(isinstance(found.ctx, ast.Load) for found in reads) and _is_alone(statement):
            rewriter.delete(statement, "nothing reads it any more")


def _is_alone(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and len(statement.targets) == 1


def finish(rewriter: Rewriter, placement: AcceleratorPlacement) -> None:
    """Settle the imports, after all rules have run."""
    new = rewriter.result()[0]  # the texts that it asks for say which names are needed
    _drop_unused_ranks(rewriter, ast.parse(new))
    add_imports(rewriter, placement.imports)
    drop_unused_imports(rewriter)
