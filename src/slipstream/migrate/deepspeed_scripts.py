"""Rules for scripts that train with DeepSpeed's engine: initialize, backward and step, checkpoints, and the configuration.

The engine becomes the prepared model, and its optimizer a variable of its own. What the configuration says goes into the Accelerator or
into lines of the script; what belongs to the launch becomes a note. A script whose engine cannot be taken apart is left as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from slipstream.migrate.ddp_scripts import finish
from slipstream.migrate.deepspeed_config import DeepSpeedConfig, find_config
from slipstream.migrate.edits import Part, Rewriter
from slipstream.migrate.placement import AcceleratorPlacement
from slipstream.migrate.process_rules import ProcessRules
from slipstream.migrate.source import Key, Script, key_of
from slipstream.migrate.training_rules import TrainingRules

__all__ = ["rewrite_deepspeed", "uses_deepspeed"]

_ENGINE: Final = "the engine is the prepared model"
_STEP: Final = "the step of the engine in its parts"
_OPTIMIZER_CLASSES: Final = (
    "deepspeed.ops.adam.FusedAdam", "deepspeed.ops.adam.DeepSpeedCPUAdam", "deepspeed.ops.adam.fused_adam.FusedAdam",
)  # fmt: skip


def uses_deepspeed(script: Script) -> bool:
    """Return whether a script imports DeepSpeed."""
    return any(name.split(".")[0] == "deepspeed" for name in script.imported.values())


def rewrite_deepspeed(rewriter: Rewriter) -> None:
    """Add the changes that move a script from DeepSpeed to Slipstream."""
    placement = AcceleratorPlacement(rewriter)
    rules = _EngineRules(rewriter, placement)
    if not rules.apply():
        return
    ProcessRules(rewriter, placement).apply()
    TrainingRules(rewriter, placement).apply_data()
    placement.settle()
    rules.settle_optimizer()
    finish(rewriter, placement)
    for node in rewriter.script.nodes:
        if isinstance(node, ast.Call) and (rewriter.script.qualified(node.func) or "").startswith("deepspeed.") and rules.is_left(node):
            name = key_of(node.func)
            rewriter.note(node, f"{name} has no counterpart here, and stays as it is. For sharded training see docs/sharded.md.")


class _EngineRules:
    """Changes the engine of one script."""

    def __init__(self, rewriter: Rewriter, placement: AcceleratorPlacement) -> None:
        self.rewriter: Final = rewriter
        self.placement: Final = placement
        self.script: Final[Script] = rewriter.script
        self.config = DeepSpeedConfig({}, "")
        self.engine: Key = ""
        self.optimizer: Key = "optimizer"
        self.scheduler: Key | None = None
        self.passing: Final = AcceleratorPlacement(rewriter)
        """Gives the optimizer to functions that call `engine.step()`."""

    def apply(self) -> bool:
        """Add the changes; return whether the script has an engine that can be taken apart, or none at all."""
        calls = list(self.script.calls("deepspeed.initialize"))
        if len(calls) > 1:
            self.rewriter.note(calls[1], "several engines: DeepSpeed stays. Prepare each model with its optimizer by hand.")
            return False
        if calls and not self._initialize(calls[0]):
            return False
        for call in self.script.calls("deepspeed.init_distributed"):
            if isinstance(self.script.parents[call], ast.Expr):
                self.placement.replaced.append(self.script.statement(call))
        for call in self.script.calls("deepspeed.add_config_arguments"):
            reason = "slipstream launch has the options"
            self.rewriter.delete(self.script.statement(call), reason)
        for call in self.script.calls(*_OPTIMIZER_CLASSES):
            self.rewriter.replace(call.func, "torch.optim.AdamW", reason="the optimizer of torch with the same update")
            self.placement.imports.add(("torch", ""))
        self._attributes()
        return True

    def is_left(self, node: ast.Call) -> bool:
        """Return whether a call of DeepSpeed is still there after the changes."""
        name = self.script.qualified(node.func) or ""
        handled = ("deepspeed.initialize", "deepspeed.init_distributed", "deepspeed.add_config_arguments", *_OPTIMIZER_CLASSES)
        return name not in handled and not name.startswith("deepspeed.comm.") and not self.rewriter.is_deleted(node)

    # the engine

    def _initialize(self, call: ast.Call) -> bool:
        statement = self.script.statement(call)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        names = self._targets(statement, call)
        model = given.get("model") or (call.args[1] if len(call.args) > 1 else None)
        if names is None or model is None:
            self.rewriter.note(call, "nothing was changed here: assign the result to four variables, and name the model, then it can be.")
            return False
        configured = given.get("config") or given.get("config_params")
        config = find_config(self.script, configured)
        if config is None:
            self.rewriter.note(
                call,
                "the configuration of DeepSpeed was not found in the script or beside it, so its precision, accumulation and clipping "
                "are not kept: give them to Accelerator(mixed_precision=, gradient_accumulation_steps=) and clip_grad_norm_.",
            )
        self.config = config or self.config
        made = self._make_optimizer(given, model)
        if made is None:
            kind = (self.config.text("optimizer", "type") or "").strip("\"'")
            told = f"torch has no optimizer {kind}" if kind else "it has no optimizer"
            self.rewriter.note(call, f"{told}, so nothing was changed here. Give one of torch.optim to initialize(optimizer=...).")
            return False
        self.engine = names[0]
        self.optimizer = names[1] if names[1] != "_" else self._free_name("optimizer")
        self.scheduler = names[3] if "lr_scheduler" in given else None
        if self.scheduler == "_":
            self.scheduler = self._free_name("lr_scheduler")
        self.rewriter.replace(statement, *self._lines(statement, given, model, made, names), reason=_ENGINE)
        self.placement.anchor = call
        self._take_options(call)
        self._drop_config(configured)
        return True

    def _targets(self, statement: ast.stmt, call: ast.Call) -> list[Key] | None:
        if not isinstance(statement, ast.Assign) or statement.value is not call or not isinstance(statement.targets[0], ast.Tuple):
            return None
        names = [key_of(target) or "*" for target in statement.targets[0].elts]
        if len(names) == 2 and isinstance(statement.targets[0].elts[1], ast.Starred):
            names = [names[0], "_", "_", "_"]
        return names if len(names) == 4 and "*" not in names else None

    def _free_name(self, name: str) -> str:
        return name if name not in self.script.names() else f"prepared_{name}"

    def _make_optimizer(self, given: Mapping[str | None, ast.expr], model: ast.expr) -> tuple[Part, ...] | None:
        if "optimizer" in given:
            return (given["optimizer"],)
        parameters = given.get("model_parameters")
        text = self.script.segment(parameters) if parameters is not None else f"{self.script.segment(model)}.parameters()"
        made = self.config.optimizer(text)
        if made is not None:
            self.placement.imports.add(("torch", ""))
        return None if made is None else (made,)

    def _lines(
        self, statement: ast.stmt, given: Mapping[str | None, ast.expr], model: ast.expr, made: Sequence[Part], names: Sequence[Key]
    ) -> list[Part]:
        """Return what replaces the call: the optimizer, the loader, and prepare."""
        end = self.script.newline + self.script.indent(statement)
        parts: list[Part] = []
        if "optimizer" not in given:
            parts += [f"{self.optimizer} = ", *made, end]
            made = (self.optimizer,)
        loader = names[2] if "training_data" in given else None
        if loader == "_":
            loader = None
        if self.scheduler is not None:
            schedule = given["lr_scheduler"]
            parts += [f"{self.scheduler} = ", "(", schedule, f")({self.optimizer})", end] if isinstance(schedule, ast.Lambda) else []
        if loader is not None:
            size = self.config.micro_batch or "1"
            collate: tuple[Part, ...] = (", collate_fn=", given["collate_fn"]) if "collate_fn" in given else ()
            parts += [f"{loader} = DataLoader(", given["training_data"], f", batch_size={size}, shuffle=True", *collate, ")", end]
            self.placement.imports.add(("torch.utils.data", "DataLoader"))
        targets: list[Key] = [self.engine, self.optimizer]
        sources: list[tuple[Part, ...]] = [(model,), tuple(made)]
        if loader is not None:
            targets.append(loader)
            sources.append((loader,))
        if self.scheduler is not None:
            schedule = given["lr_scheduler"]
            targets.append(self.scheduler)
            sources.append((self.scheduler if isinstance(schedule, ast.Lambda) else schedule,))
        parts += [f"{', '.join(targets)} = ", self.placement.need(statement), ".prepare("]
        for number, source in enumerate(sources):
            parts += [", " if number else "", *source]
        return [*parts, ")"]

    def _take_options(self, call: ast.Call) -> None:
        if self.config.precision is not None:
            self.placement.options["mixed_precision"] = self.config.precision
        if self.config.accumulation is not None:
            self.placement.options["gradient_accumulation_steps"] = self.config.accumulation
        for note in self.config.notes():
            self.rewriter.note(call, note)

    def _drop_config(self, given: ast.expr | None) -> None:
        """Delete the variable of the configuration if nothing else reads it."""
        key = key_of(given)
        if key is None or "." in key:
            return
        reads = [node for node in self.script.nodes if key_of(node) == key and isinstance(getattr(node, "ctx", None), ast.Load)]
        for name, value, statement in self.script.assignments():
            if name == key and len(reads) == 1 and isinstance(value, (ast.Dict, ast.Constant)):
                self.rewriter.delete(statement, "the Accelerator and the script say the same")

    # what is done with the engine

    def _attributes(self) -> None:
        if not self.engine:
            return
        last = self.engine.rpartition(".")[2]
        for node in self.script.nodes:
            if not isinstance(node, ast.Attribute) or (key_of(node.value) or "").rpartition(".")[2] != last:
                continue
            parent = self.script.parents[node]
            call = parent if isinstance(parent, ast.Call) and parent.func is node else None
            self._attribute(node, call)

    def _attribute(self, node: ast.Attribute, call: ast.Call | None) -> None:
        state = {"local_rank": "local_process_index", "global_rank": "process_index", "world_size": "num_processes", "device": "device"}
        calls: Mapping[str, Callable[[ast.Attribute, ast.Call], None]] = {
            "backward": self._backward,
            "step": self._step,
            "zero_grad": self._zero_grad,
            "save_checkpoint": self._save,
            "load_checkpoint": self._load,
            "is_gradient_accumulation_boundary": self._boundary,
            "gradient_accumulation_steps": self._accumulation_steps,
            "train_micro_batch_size_per_gpu": self._micro_batch,
            "get_lr": self._learning_rate,
        }
        parent = self.script.parents[node]
        if node.attr == "local_rank" and self.script.is_call(parent, ".to"):
            return  # a device: the rules of processes change it
        if node.attr in state:
            self.rewriter.replace(node, self.placement.need(node, state=True), f".{state[node.attr]}", reason=_ENGINE)
        elif node.attr == "module":
            self.rewriter.replace(node, self.placement.need(node), ".unwrap_model(", node.value, ")", reason=_ENGINE)
        elif call is not None and node.attr in calls:
            calls[node.attr](node, call)
        elif node.attr in _ENGINE_ONLY:
            self.rewriter.note(node, f"{key_of(node)} is a part of DeepSpeed's engine; a prepared model has none.")

    def _backward(self, node: ast.Attribute, call: ast.Call) -> None:
        loss = call.args[0] if call.args else next((keyword.value for keyword in call.keywords if keyword.arg == "loss"), None)
        if loss is None:
            self.rewriter.note(call, "write accelerator.backward(loss).")
            return
        reason = "backward of the Accelerator"
        self.rewriter.replace(call, self.placement.need(call), ".backward(", loss, ")", reason=reason)
        self._accumulate(call)

    def _accumulate(self, call: ast.Call) -> None:
        """Put forward, backward and step under `accumulate`, if the configuration accumulates."""
        if self.config.accumulation is None:
            return
        block = self.script.block(self.script.statement(call))
        first = next((number for number, statement in enumerate(block) if self._has(statement, None)), None)
        last = next((number for number, statement in enumerate(block) if self._has(statement, "step")), None)
        if first is None or last is None or last < first:
            told = "put forward, backward and step of one batch under `with accelerator.accumulate(model):`; they are in different blocks."
            self.rewriter.note(call, told)
            return
        header: tuple[Part, ...] = ("with ", self.placement.need(call), f".accumulate({self._engine_at(call)}):")
        self.rewriter.indent_block(block[first : last + 1], header, "gradient_accumulation_steps of the configuration")

    def _engine_at(self, call: ast.Call) -> str:
        assert isinstance(call.func, ast.Attribute)
        return self.script.segment(call.func.value)

    def _has(self, statement: ast.stmt, method: str | None) -> bool:
        """Whether a statement calls the engine, or a method of it."""
        last = self.engine.rpartition(".")[2]
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            if method is not None and isinstance(function, ast.Attribute) and function.attr == method:
                function = function.value
            elif method is not None:
                continue
            if (key_of(function) or "").rpartition(".")[2] == last:
                return True
        return False

    def _optimizer_at(self, node: ast.AST) -> Part:
        """Return the optimizer at a node: its variable, an argument of that name, or one that is passed there."""
        unit = self.script.unit(node)
        home = self.script.unit(self.placement.anchor) if self.placement.anchor is not None else unit
        arguments = [found for found in self.script.nodes if isinstance(found, ast.arg) and found.arg == self.optimizer]
        has_argument = any(self.script.unit(found) is unit for found in arguments)
        if unit is home or home is None or has_argument:
            return self.optimizer
        return self.passing.need(node)

    def settle_optimizer(self) -> None:
        """Pass the optimizer to the functions that step it."""
        if self.placement.anchor is not None:
            self.passing.pass_from(self.script.unit(self.placement.anchor), self.optimizer)

    def _step(self, node: ast.Attribute, call: ast.Call) -> None:
        statement = self.script.statement(call)
        if not isinstance(statement, ast.Expr):
            self.rewriter.note(call, "write optimizer.step() and optimizer.zero_grad() instead of the step of the engine.")
            return
        end = self.script.newline + self.script.indent(statement)
        if self.config.accumulation is not None:
            end += "\t" if self.script.indent(statement).endswith("\t") else "    "
        optimizer = self._optimizer_at(call)
        parts: list[Part] = []
        if self.config.is_on("gradient_clipping"):
            limit = self.config.text("gradient_clipping") or "1.0"
            parts += [self.placement.need(call), ".clip_grad_norm_(", node.value, f".parameters(), {limit})", end]
        parts += [optimizer, ".step()", end]
        if self.scheduler is not None:
            if self.script.unit(call) in (None, self.script.unit(self.placement.anchor or call)):
                parts += [f"{self.scheduler}.step()", end]
            else:
                told = f"call {self.scheduler}.step() after the update, as the engine did: {self.scheduler} is not known here."
                self.rewriter.note(call, told)
        self.rewriter.replace(call, *parts, optimizer, ".zero_grad()", reason=_STEP)

    def _zero_grad(self, node: ast.Attribute, call: ast.Call) -> None:
        self.rewriter.replace(node.value, self._optimizer_at(call), reason=_STEP)

    def _save(self, node: ast.Attribute, call: ast.Call) -> None:
        self._checkpoint(call, "save_state")

    def _load(self, node: ast.Attribute, call: ast.Call) -> None:
        if isinstance(self.script.parents[call], ast.Expr):
            self._checkpoint(call, "load_state")
        else:
            told = "load_checkpoint returns the client state: write accelerator.load_state(folder), and register your own state for it."
            self.rewriter.note(call, told)

    def _checkpoint(self, call: ast.Call, method: str) -> None:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        folder = call.args[0] if call.args else given.get("save_dir") or given.get("load_dir")
        tag = given.get("tag") or (call.args[1] if len(call.args) > 1 else None)
        if folder is None:
            self.rewriter.note(call, f"write accelerator.{method}(folder).")
            return
        if "client_state" in given:
            told = "client_state is not saved any more: give your own state to accelerator.register_for_checkpointing(...)."
            self.rewriter.note(call, told)
        place: tuple[Part, ...] = (folder,)
        if tag is not None:
            self.placement.imports.add(("os", ""))
            is_text = isinstance(tag, ast.JoinedStr) or (isinstance(tag, ast.Constant) and isinstance(tag.value, str))
            place = ("os.path.join(", folder, ", ", tag, ")") if is_text else ("os.path.join(", folder, ", str(", tag, "))")
        reason = "checkpoints have all state, and are verified"
        self.rewriter.replace(call, self.placement.need(call), f".{method}(", *place, ")", reason=reason)

    def _boundary(self, node: ast.Attribute, call: ast.Call) -> None:
        self.rewriter.replace(call, self.placement.need(call), ".sync_gradients", reason=_STEP)

    def _accumulation_steps(self, node: ast.Attribute, call: ast.Call) -> None:
        self.rewriter.replace(call, self.placement.need(call), ".gradient_accumulation_steps", reason=_STEP)

    def _micro_batch(self, node: ast.Attribute, call: ast.Call) -> None:
        size = self.config.text("train_micro_batch_size_per_gpu")
        if size is None:
            self.rewriter.note(call, "write the batch size of one process here.")
        else:
            self.rewriter.replace(call, size, reason=f"the batch size of the configuration ({self.config.place})")

    def _learning_rate(self, node: ast.Attribute, call: ast.Call) -> None:
        self.rewriter.replace(call, '[group["lr"] for group in ', self._optimizer_at(call), ".param_groups]", reason=_STEP)


_ENGINE_ONLY: Final = (
    "train_batch_size", "get_global_grad_norm", "fp16_enabled", "bfloat16_enabled", "zero_optimization_stage", "global_steps",
    "micro_steps", "skipped_steps", "optimizer", "lr_scheduler", "save_16bit_model", "save_fp16_model", "allreduce_gradients",
    "set_gradient_accumulation_boundary", "loss_scale", "cur_scale",
)  # fmt: skip
"""Parts of DeepSpeed's engine without a counterpart that could be written in their place."""
