"""The configuration of a DeepSpeed script: a dict in the script, or its JSON file, with what each part becomes.

Leaves are kept as text of Python, so that values which the script computes (`args.lr`) can be used where they stood.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from slipstream.errors import ConfigError
from slipstream.migrate.source import Script, key_of

__all__ = ["DeepSpeedConfig", "find_config"]

_Tree: TypeAlias = dict[str, Any]
"""Nested dicts, with texts of Python as leaves."""

_OPTIMIZERS: Final[Mapping[str, str]] = {
    "adam": "torch.optim.AdamW",  # DeepSpeed's Adam decouples the weight decay unless it is told otherwise
    "adamw": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
}
_OPTIMIZER_OPTIONS: Final = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "amsgrad")
_READ: Final = (
    "optimizer", "scheduler", "gradient_clipping", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size",
    "fp16", "bf16", "bfloat16", "zero_optimization", "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer",
    "dump_state", "prescale_gradients",
)  # fmt: skip


class DeepSpeedConfig:
    """What a script asks of DeepSpeed."""

    def __init__(self, tree: _Tree, place: str) -> None:
        self.tree: Final = tree
        self.place: Final = place
        """Where it was read, for notes."""

    def text(self, *path: str) -> str | None:
        """Return a value as Python text; None if it is not set."""
        found: Any = self.tree
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, str) and found != "'auto'" else None

    def is_on(self, *path: str) -> bool:
        """Return whether a switch is on; one that the script computes counts as on."""
        return self.text(*path) not in (None, "False", "0", "0.0")

    @property
    def precision(self) -> str | None:
        """The text of `mixed_precision`."""
        for name, value in (("fp16", "fp16"), ("bf16", "bf16"), ("bfloat16", "bf16")):
            enabled = self.text(name, "enabled")
            if enabled == "True":
                return f'"{value}"'
            if enabled not in (None, "False"):
                return f'"{value}" if {enabled} else "no"'
        return None

    @property
    def accumulation(self) -> str | None:
        """The text of `gradient_accumulation_steps`, if it may be more than 1."""
        steps = self.text("gradient_accumulation_steps")
        return None if steps in (None, "1") else steps

    @property
    def micro_batch(self) -> str | None:
        """The batch size of one process: given, or the rest of the global one."""
        if (size := self.text("train_micro_batch_size_per_gpu")) is not None:
            return size
        total = self.text("train_batch_size")
        if total is None:
            return None
        steps = f" // {self.accumulation}" if self.accumulation else ""
        return f"{total}{steps} // accelerator.num_processes"

    def optimizer(self, parameters: str) -> str | None:
        """Return the call that makes the optimizer of the configuration; None if torch has no such optimizer, or there is none."""
        kind = (self.text("optimizer", "type") or "").strip("'\"").lower()
        if kind not in _OPTIMIZERS or self.text("optimizer", "params", "adam_w_mode") == "False":
            return None
        given = {name: self.text("optimizer", "params", name) for name in _OPTIMIZER_OPTIONS}
        options = [f"{name}={f'({value[1:-1]})' if value[0] == '[' else value}" for name, value in given.items() if value is not None]
        return f"{_OPTIMIZERS[kind]}({', '.join((parameters, *options))})"

    def notes(self) -> Iterator[str]:
        """Return what becomes of parts that no line of the script can hold."""
        stage = self.text("zero_optimization", "stage")
        if stage not in (None, "0"):
            reshard = "true" if stage == "3" else "false"
            offload = " --fsdp_offload_params true" if isinstance(self.tree["zero_optimization"].get("offload_optimizer"), dict) else ""
            offload = offload or (" --fsdp_offload_params true" if "offload_param" in self.tree["zero_optimization"] else "")
            yield (
                f"ZeRO stage {stage} ({self.place}) is sharded training: start the script with "
                f"`slipstream launch --use_fsdp --fsdp_reshard_after_forward {reshard}{offload}` (docs/sharded.md). "
                "Without it every process holds the whole model and optimizer."
            )
        if "scheduler" in self.tree:
            kind = self.text("scheduler", "type")
            yield f"the scheduler {kind} ({self.place}) is not made any more: make, prepare and step one of torch.optim.lr_scheduler."
        for name in self.tree:
            if name not in _READ:
                yield f"{name} ({self.place}) has no counterpart here, and is left out."


def find_config(script: Script, given: ast.expr | None) -> DeepSpeedConfig | None:
    """Return the configuration that a script gives to `deepspeed.initialize`; None if it is not in the script or beside it."""
    if given is not None and (key := key_of(given)) is not None:
        values = [value for name, value, _ in script.assignments() if name == key]
        given = values[-1] if values else given
    if isinstance(given, ast.Dict):
        return DeepSpeedConfig(_tree_of_dict(script, given), f"line {given.lineno}")
    if isinstance(given, ast.Constant) and isinstance(given.value, str):
        return _read(Path(script.name).parent / given.value)
    if given is not None and (key_of(given) or "").rpartition(".")[2] not in ("deepspeed_config", "ds_config", "config"):
        return None
    beside = [path for path in sorted(Path(script.name).parent.glob("*.json")) if _is_config(path)]
    return _read(beside[0]) if len(beside) == 1 else None


def _tree_of_dict(script: Script, node: ast.Dict) -> _Tree:
    tree: _Tree = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant):
            tree[str(key.value)] = _tree_of_dict(script, value) if isinstance(value, ast.Dict) else script.segment(value)
    return tree


def _is_config(path: Path) -> bool:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and bool({"train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"} & found.keys())


def _read(path: Path) -> DeepSpeedConfig | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"The DeepSpeed configuration {path} is not JSON: {error}.\nNothing was changed.") from None
    return DeepSpeedConfig(_tree_of_data(found), path.name)


def _tree_of_data(data: Mapping[str, Any]) -> _Tree:
    return {name: _tree_of_data(value) if isinstance(value, dict) else repr(value) for name, value in data.items()}
