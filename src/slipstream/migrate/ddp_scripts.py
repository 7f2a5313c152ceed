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


def finish(rewriter: Rewriter, placement: AcceleratorPlacement) -> None:
    """Settle the imports, after all rules have run."""
    rewriter.result()  # the texts that it asks for say which names are needed
    add_imports(rewriter, placement.imports)
    drop_unused_imports(rewriter)
