"""Rules for how a hand-written script trains: DistributedDataParallel, samplers and loaders, optimizers, backward, mixed precision.

Objects are prepared where they are made, so the order of the script stays. A loader that had no DistributedSampler is left as it is:
every process reads all of it, as before.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from slipstream.migrate.edits import Part, Rewriter
from slipstream.migrate.placement import AcceleratorPlacement
from slipstream.migrate.source import Key, Script, key_of

__all__ = ["TrainingRules", "WRAPPERS"]

WRAPPERS: Final = (
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "torch.nn.parallel.DDP",
)
_SAMPLERS: Final = ("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler")
_BATCH_SAMPLERS: Final = ("torch.utils.data.BatchSampler", "torch.utils.data.sampler.BatchSampler")
_LOADERS: Final = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_AUTOCASTS: Final = ("torch.cuda.amp.autocast", "torch.amp.autocast", "torch.autocast", "torch.cpu.amp.autocast")
_SCALERS: Final = ("torch.cuda.amp.GradScaler", "torch.amp.GradScaler", "torch.amp.grad_scaler.GradScaler")
_DROPPED_OPTIONS: Final = ("device_ids", "output_device", "dim", "module", "device_mesh", "init_sync")
_HANDLED_OPTIONS: Final = ("find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view", "static_graph", "bucket_cap_mb")
_DISTRIBUTED: Final = re.compile(r"ddp|distribut|world_size|rank|is_initialized|nprocs|num_gpus|ngpus|num_processes|multi", re.IGNORECASE)
_MODEL_NAME: Final = re.compile(r"(model|net|network|module|ddp|engine|encoder|decoder)$", re.IGNORECASE)
_METHODS_OF_BOTH: Final = ("state_dict", "load_state_dict", "parameters", "named_parameters", "train", "eval")

_PREPARE_MODEL: Final = "prepare makes the replicas"
_PREPARE_LOADER: Final = "a prepared loader shares out the samples"
_PREPARE_OPTIMIZER: Final = "optimizers are prepared, too"
_BACKWARD: Final = "backward scales and weights the loss"
_AMP: Final = "the Accelerator holds the precision and the loss scale"
_UNWRAP: Final = "prepared models need no .module"


class _Sampler(NamedTuple):
    """A DistributedSampler: its call, and the text of its option `shuffle`."""

    call: ast.Call
    shuffle: Part


class TrainingRules:
    """Changes models, loaders, optimizers and steps of one script."""

    def __init__(self, rewriter: Rewriter, placement: AcceleratorPlacement) -> None:
        self.rewriter: Final = rewriter
        self.placement: Final = placement
        self.script: Final[Script] = rewriter.script
        self.wrapped: Final = {key for key, value, _ in self.script.assignments() if self.script.is_call(value, *WRAPPERS)}
        self.scalers: Final = {key for key, value, _ in self.script.assignments() if self.script.is_call(value, *_SCALERS)}
        self.samplers: Final = self._find_samplers()
        self.converted: Final[set[Key]] = set()
        """Samplers whose loaders are prepared."""
        self.loaders: Final[dict[Key, Key]] = {}
        """The loader of each sampler, by their variables."""
        self.settled: Final[set[ast.If]] = set()
        """Conditions that are removed."""
        self.converts_precision: Final = self._plan_precision()

    def apply(self) -> None:
        """Add the changes."""
        self._models()
        self.apply_data()
        if not any(True for _ in self.script.calls(*WRAPPERS)):
            self._note_steps()
            return
        self._optimizers()
        self._precision()
        self._backward()
        self._accumulation()
        self._unwrap()
        self._bring_out_of_conditions()

    def _note_steps(self) -> None:
        """The model is wrapped in another file: its loop gets the Accelerator by hand."""
        for call in self.script.calls(".backward"):
            assert isinstance(call.func, ast.Attribute)
            if not call.args and self.script.qualified(call.func) is None and not (key_of(call.func.value) or "").endswith("accelerator"):
                told = "if the model is prepared in another file, give this function the Accelerator and write accelerator.backward(loss)"
                self.rewriter.note(call, f"{told}, and accelerator.clip_grad_norm_ if it clips.")

    def apply_data(self) -> None:
        """Add the changes of samplers and loaders alone."""
        self._loaders()
        self._epochs()
        self._remove_samplers()

    def accelerator(self, node: ast.AST) -> Part:
        """Return the Accelerator at a node."""
        return self.placement.need(node)

    # models

    def _models(self) -> None:
        for call in self.script.calls(*WRAPPERS):
            model = call.args[0] if call.args else next((keyword.value for keyword in call.keywords if keyword.arg == "module"), None)
            if model is None:
                self.rewriter.note(call, "this call has no model: give the model to accelerator.prepare(...) by hand.")
                continue
            if self.placement.anchor is None:
                self.placement.anchor = call
            self.rewriter.replace(call, self.accelerator(call), ".prepare(", model, ")", reason=_PREPARE_MODEL)
            self._keep_options(call)
        for call in self.script.calls("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
            told = "DataParallel stays as it is. One process per device is faster: use accelerator.prepare(model) here, too."
            self.rewriter.note(call, told)

    def _keep_options(self, call: ast.Call) -> None:
        for keyword in call.keywords:
            value = self.script.segment(keyword.value)
            if keyword.arg in _HANDLED_OPTIONS and isinstance(keyword.value, ast.Constant):
                self.placement.add_handler_option("DistributedDataParallelKwargs", keyword.arg, keyword.value)
            elif keyword.arg not in _DROPPED_OPTIONS:
                self.rewriter.note(
                    keyword.value,
                    f"{keyword.arg}={value} of DistributedDataParallel was not kept: "
                    "give it to Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(...)]) if it matters.",
                )

    def _unwrap(self) -> None:
        names = {key.rpartition(".")[2] for key in self.wrapped}
        for node in self.script.nodes:
            if isinstance(node, ast.IfExp) and self._is_unwrapping(node):
                reached = node.orelse
                self.rewriter.replace(node, self.accelerator(node), ".unwrap_model(", reached, ")", reason=_UNWRAP)
            elif isinstance(node, ast.Attribute) and node.attr == "module" and isinstance(node.ctx, ast.Load):
                self._unwrap_attribute(node, names)
            elif isinstance(node, ast.Attribute) and node.attr == "state_dict" and key_of(node.value) in self.wrapped:
                told = "the names in this state had the prefix `module.` before and have none now; remove it from the names in older files."
                self.rewriter.note(node, told)

    def _is_unwrapping(self, node: ast.IfExp) -> bool:
        """Whether an expression is `model.module if ... else model`."""
        body = node.body
        key = key_of(node.orelse)
        return isinstance(body, ast.Attribute) and body.attr == "module" and key is not None and key_of(body.value) == key

    def _unwrap_attribute(self, node: ast.Attribute, names: set[str]) -> None:
        key = key_of(node.value)
        if key in (None, "self") or self.script.qualified(node) is not None:
            return
        last = str(key).rpartition(".")[2]
        if last not in names and not _MODEL_NAME.search(last):
            return
        parent = self.script.parents[node]
        if isinstance(parent, ast.Attribute) and parent.attr in _METHODS_OF_BOTH:
            self.rewriter.replace(node, node.value, reason=_UNWRAP)
        else:
            self.rewriter.replace(node, self.accelerator(node), ".unwrap_model(", node.value, ")", reason=_UNWRAP)

    def _bring_out_of_conditions(self) -> None:
        """`if distributed: model = DDP(model)` becomes one line: prepare is right on one process, too."""
        for node in self.script.nodes:
            if not isinstance(node, ast.If) or node.orelse or not _DISTRIBUTED.search(ast.unparse(node.test)):
                continue
            parent = self.script.parents[node]
            if isinstance(parent, ast.If) and node in parent.orelse:
                continue
            kept = [statement for statement in node.body if not self.rewriter.is_deleted(statement)]
            if kept and all(isinstance(statement, ast.Assign) and self.script.is_call(statement.value, *WRAPPERS) for statement in kept):
                self.rewriter.unwrap_block(node, _PREPARE_MODEL)

    # samplers and loaders

    def _find_samplers(self) -> dict[Key, _Sampler]:
        found: dict[Key, _Sampler] = {}
        for key, value, _ in self.script.assignments():
            sampler = self._sampler_of(value)
            if sampler is not None:
                found[key] = sampler
        return found

    def _sampler_of(self, value: ast.expr) -> _Sampler | None:
        """Return the DistributedSampler of an expression, also of `DistributedSampler(...) if ... else None`."""
        if isinstance(value, ast.IfExp):
            return self._sampler_of(value.body) or self._sampler_of(value.orelse)
        if not isinstance(value, ast.Call) or not self.script.is_call(value, *_SAMPLERS):
            return None
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        shuffle = given.get("shuffle") or (value.args[3] if len(value.args) > 3 else None)
        return _Sampler(value, shuffle if shuffle is not None else "True")

    def _loaders(self) -> None:
        targets = {value: key for key, value, _ in self.script.assignments()}
        for call in self.script.calls(*_LOADERS):
            given = {keyword.arg: keyword for keyword in call.keywords}
            keyword = given.get("sampler")
            if keyword is None:
                self._batch_sampler(call, given.get("batch_sampler"), targets.get(call))
                continue
            key = key_of(keyword.value)
            sampler = self.samplers.get(key) if key is not None else self._sampler_of(keyword.value)
            if sampler is None:
                if not isinstance(keyword.value, ast.Constant) and key is not None and "sampler" in key:
                    told = f"if {key} is a DistributedSampler, leave it out and prepare the loader: accelerator.prepare(DataLoader(...))."
                    self.rewriter.note(call, told)
                continue
            self._prepare_loader(call, keyword, ("shuffle=", sampler.shuffle), sampler)
            if "shuffle" in given:
                self.rewriter.remove_argument(call, given["shuffle"], _PREPARE_LOADER)
            if key is not None:
                self.converted.add(key)
            if call in targets and key is not None:
                self.loaders[key] = targets[call]

    def _batch_sampler(self, call: ast.Call, keyword: ast.keyword | None, loader: Key | None) -> None:
        """`batch_sampler=BatchSampler(sampler, size, drop_last)` around a DistributedSampler becomes options of the loader."""
        if keyword is None:
            return
        made, statement = self._value_of(keyword.value)
        if not self.script.is_call(made, *_BATCH_SAMPLERS) or not isinstance(made, ast.Call):
            return
        given = {argument.arg: argument.value for argument in made.keywords}
        values = [*made.args, *(given[name] for name in ("sampler", "batch_size", "drop_last")[len(made.args) :] if name in given)]
        key = key_of(values[0]) if values else None
        if len(values) != 3 or key is None or key not in self.samplers:
            return
        sampler = self.samplers[key]
        options = ("batch_size=", values[1], ", shuffle=", sampler.shuffle, ", drop_last=", values[2])
        self._prepare_loader(call, keyword, options, sampler)
        if statement is not None:
            self.rewriter.delete(statement, _PREPARE_LOADER)
        self.converted.add(key)
        if loader is not None:
            self.loaders[key] = loader

    def _value_of(self, node: ast.expr) -> tuple[ast.expr, ast.stmt | None]:
        """Return an expression, or what the only assignment of a variable gives it, with that statement."""
        found = [(value, statement) for key, value, statement in self.script.assignments() if key == key_of(node)]
        return found[0] if len(found) == 1 else (node, None)

    def _prepare_loader(self, call: ast.Call, keyword: ast.keyword, options: Sequence[Part], sampler: _Sampler) -> None:
        given = {argument.arg: argument.value for argument in sampler.call.keywords}
        seed = given.get("seed")
        if seed is not None and ast.unparse(seed) != "0":
            told = f"the order of samples had the seed {ast.unparse(seed)}: give it as DataLoaderConfiguration(data_seed=...)."
            self.rewriter.note(seed, told)
        self.rewriter.replace(keyword, *options, reason=_PREPARE_LOADER)
        self.rewriter.wrap(call, (self.accelerator(call), ".prepare("), ")", _PREPARE_LOADER)

    def _epochs(self) -> None:
        """`sampler.set_epoch(epoch)` becomes that of the loader, or goes: every pass is the next epoch."""
        for call in self.script.calls(".set_epoch"):
            assert isinstance(call.func, ast.Attribute)
            owner = call.func.value
            key = key_of(owner)
            if key is None or not isinstance(self.script.parents[call], ast.Expr):
                continue
            last = key.rpartition(".")[2]
            if isinstance(owner, ast.Attribute) and owner.attr in ("sampler", "batch_sampler") and key.count(".") > key.startswith("self."):
                self.rewriter.replace(owner, owner.value, reason=_PREPARE_LOADER)
            elif key in self.loaders and self._shares_unit(key, call):
                self.rewriter.replace(owner, self.loaders[key], reason="the loader has the epoch")
                condition = self.script.parents[self.script.statement(call)]
                if isinstance(condition, ast.If) and self._asks_for(condition, key):
                    self.rewriter.unwrap_block(condition, "the loader has the epoch")
                    self.settled.add(condition)
            elif key in self.samplers or "sampler" in last:
                self.rewriter.delete(self.script.statement(call), "every pass is the next epoch")

    def _asks_for(self, condition: ast.If, sampler: Key) -> bool:
        """Whether a condition only asks if there is a sampler."""
        test = ast.unparse(condition.test)
        return not condition.orelse and len(condition.body) == 1 and test.startswith((f"isinstance({sampler}, ", f"{sampler} is not None"))

    def _shares_unit(self, sampler: Key, node: ast.AST) -> bool:
        return self.script.unit(self.samplers[sampler].call) is self.script.unit(node)

    def _remove_samplers(self) -> None:
        """Delete variables of samplers that nothing reads any more; the others become None."""
        for key, sampler in self.samplers.items():
            if key not in self.converted:
                told = "this DistributedSampler stays: it is not known which loader it is for. A loader that is prepared must not have one."
                self.rewriter.note(sampler.call, told)
                continue
            assigned = [(value, statement) for found, value, statement in self.script.assignments() if found == key]
            unit = self.script.unit(self.samplers[key].call)
            left = [node for node in self._reads(key) if self.script.unit(node) is unit or "." in key]
            left = [node for node in left if not self._replace_length(key, node)]
            for value, statement in assigned:
                if not left and self._is_sampler_value(value):
                    self.rewriter.delete(statement, _PREPARE_LOADER)
                elif self._sampler_of(value) is not None:
                    self.rewriter.replace(value, "None", reason=_PREPARE_LOADER)
            for node in left:
                parent = self.script.parents[node]
                if not isinstance(parent, (ast.Return, ast.Tuple, ast.Compare)):
                    self.rewriter.note(node, f"{key} is None now: the prepared loader has no sampler. Use the loader instead.")

    def _replace_length(self, key: Key, node: ast.AST) -> bool:
        """Replace `len(sampler)`, the number of samples of one process; return whether that was possible."""
        parent = self.script.parents[node]
        if key not in self.loaders or not isinstance(parent, ast.Call) or key_of(parent.func) != "len":
            return False
        count = self.placement.need(parent, state=True)
        self.rewriter.replace(parent, f"-(-len({self.loaders[key]}.dataset) // ", count, ".num_processes)", reason=_PREPARE_LOADER)
        return True

    def _is_sampler_value(self, value: ast.expr) -> bool:
        name = (self.script.qualified(value.func) or "") if isinstance(value, ast.Call) else ""
        is_none = isinstance(value, ast.Constant) and value.value is None
        return is_none or self._sampler_of(value) is not None or name.rpartition(".")[2] in ("RandomSampler", "SequentialSampler")

    def _reads(self, key: Key) -> Iterator[ast.AST]:
        """Return the places that read a variable of a sampler, and that no other change removes."""
        for node in self.script.nodes:
            if key_of(node) != key or not isinstance(getattr(node, "ctx", None), ast.Load) or self.rewriter.is_deleted(node):
                continue
            parents = list(self.script.ancestors(node))[:5]
            if any(isinstance(parent, ast.If) and parent in self.settled for parent in parents):
                continue
            option = next((parent for parent in parents if isinstance(parent, ast.keyword)), None)
            call = self.script.parents[option] if option is not None else None
            names = ("sampler", "shuffle", "batch_sampler")
            if option is not None and option.arg in names and call is not None and self.script.is_call(call, *_LOADERS):
                continue
            if isinstance(parents[0], ast.Attribute) and parents[0].attr == "set_epoch" and self.rewriter.is_replaced(node):
                continue
            yield node

    # optimizers

    def _optimizers(self) -> None:
        names = {key.rpartition(".")[2] for key in self._stepped()}
        returned = self._returned()
        for node in self.script.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Call):
                self._prepare_unpacked(node, node.targets[0], names, returned)
        for key, value, statement in self.script.assignments():
            name = self.script.qualified(value.func) or "" if isinstance(value, ast.Call) else ""
            is_optimizer = name.startswith("torch.optim.") and "lr_scheduler" not in name and "swa_utils" not in name
            if not isinstance(value, ast.Call) or not (is_optimizer or key.rpartition(".")[2] in names):
                continue
            function = self._function(statement)
            if function is not None and (function.name, key) in returned and self._is_called(function.name):
                continue  # the caller prepares it
            if self.script.is_call(value, ".prepare"):
                continue
            self.rewriter.wrap(value, (self.accelerator(value), ".prepare("), ")", _PREPARE_OPTIMIZER)

    def _stepped(self) -> set[Key]:
        """Return the variables whose `zero_grad` and `step` are called."""
        cleared = {key_of(call.func.value) for call in self.script.calls(".zero_grad") if isinstance(call.func, ast.Attribute)}
        stepped = {key_of(call.func.value) for call in self.script.calls(".step") if isinstance(call.func, ast.Attribute)}
        for call in self.script.calls(".step"):
            if isinstance(call.func, ast.Attribute) and key_of(call.func.value) in self.scalers and call.args:
                stepped.add(key_of(call.args[0]))
        return {key for key in cleared & stepped if key is not None}

    def _returned(self) -> set[tuple[str, Key]]:
        """Return the variables that functions give back."""
        found: set[tuple[str, Key]] = set()
        for node in self.script.nodes:
            function = self._function(node)
            if isinstance(node, ast.Return) and function is not None and node.value is not None:
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                found |= {(function.name, key) for key in map(key_of, values) if key is not None}
        return found

    def _function(self, node: ast.AST) -> ast.FunctionDef | None:
        return next((parent for parent in self.script.ancestors(node) if isinstance(parent, ast.FunctionDef)), None)

    def _is_called(self, name: str) -> bool:
        return any((key_of(call.func) or "").rpartition(".")[2] == name for call in self.script.nodes if isinstance(call, ast.Call))

    def _prepare_unpacked(self, node: ast.Assign, targets: ast.Tuple, names: set[str], returned: set[tuple[str, Key]]) -> None:
        """`a, optimizer = build()` is followed by a line that prepares the optimizer."""
        assert isinstance(node.value, ast.Call)
        function = (key_of(node.value.func) or "").rpartition(".")[2]
        for target in targets.elts:
            key = key_of(target)
            if key is None or not any(found == function for found, _ in returned) or self.script.is_call(node.value, ".prepare"):
                continue
            if key.rpartition(".")[2] in names or key in ("optimizer", "opt", "optim"):
                place = self.script.line_end(self.script.span(node)[1])
                indent, base = self.script.indent(node), self.accelerator(node)
                line = (indent, f"{key} = ", base, f".prepare({key})", self.script.newline)
                self.rewriter.replace_span(place, place, *line, reason=_PREPARE_OPTIMIZER)

    # mixed precision

    def _plan_precision(self) -> bool:
        """Decide whether autocast and the loss scale can be the Accelerator's, and note its precision."""
        autocasts = list(self.script.calls(*_AUTOCASTS))
        if not autocasts or not any(True for _ in self.script.calls(*WRAPPERS)):
            return False
        found = {self._precision_of(call) for call in autocasts}
        is_plain = all(isinstance(self.script.parents[call], ast.withitem) for call in autocasts)
        is_plain = is_plain and all(isinstance(self.script.parents[call], ast.Assign) for call in self.script.calls(*_SCALERS))
        is_plain = is_plain and all(value is not None and self._is_setting(value[1]) for value in found)
        if not is_plain or len(found) != 1:
            if any(True for _ in self.script.calls(*_SCALERS)):
                told = "autocast and GradScaler stay: their precision is computed. Accelerator(mixed_precision=...) can replace both."
                self.rewriter.note(autocasts[0], told)
            return False
        ((precision, enabled),) = (value for value in found if value is not None)
        self.placement.options["mixed_precision"] = f'"{precision}"' if enabled is None else f'"{precision}" if {enabled} else "no"'
        return True

    def _is_setting(self, enabled: str | None) -> bool:
        """Whether the switch of autocast is a setting of the run: an option, or a constant of the module."""
        names = {node.id for node in ast.walk(ast.parse(enabled or "True", mode="eval")) if isinstance(node, ast.Name)}
        constants = {key for key, _, statement in self.script.assignments() if statement in self.script.tree.body}
        return names <= constants | {"args", "cfg", "config", "opt", "opts"}

    def _precision_of(self, call: ast.Call) -> tuple[str, str | None] | None:
        """Return the precision of an autocast, and the expression that turns it on; None if it is computed."""
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        name = self.script.qualified(call.func) or ""
        has_device = name in ("torch.autocast", "torch.amp.autocast")
        device = given.get("device_type") or (call.args[0] if call.args and has_device else None)
        enabled = given.get("enabled") or (call.args[0] if call.args and not has_device else None)
        dtype = given.get("dtype") or (call.args[1] if len(call.args) > 1 else None)
        on_cpu = ".cpu." in name or (isinstance(device, ast.Constant) and device.value == "cpu")
        default = "torch.bfloat16" if on_cpu else "torch.float16"
        text = self.script.qualified(dtype) if dtype is not None else default
        precision = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.half": "fp16"}.get(text or "")
        if precision is None:
            return None
        is_on = enabled is None or (isinstance(enabled, ast.Constant) and enabled.value is True)
        return precision, None if is_on or enabled is None else self.script.segment(enabled)

    def _precision(self) -> None:
        for call in self.script.calls("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"):
            name = (self.script.qualified(call.func) or "").rpartition(".")[2]
            self.rewriter.replace(call.func, self.accelerator(call), f".{name}", reason="clips unscaled gradients")
            for keyword in call.keywords:
                if keyword.arg in ("error_if_nonfinite", "foreach"):
                    self.rewriter.remove_argument(call, keyword, "clips unscaled gradients")
                    told = "was dropped: Accelerator(on_nan=...) says what happens to updates that are not finite"
                    self.rewriter.note(call, f"{keyword.arg}= {told}.")
        if not self.converts_precision:
            return
        for call in self.script.calls(*_AUTOCASTS):
            self.rewriter.replace(call, self.accelerator(call), ".autocast()", reason=_AMP)
        self._remove_scaler()

    def _remove_scaler(self) -> None:
        calls = [call for call in self.script.nodes if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)]
        kept: set[Key] = set()
        for call in calls:
            assert isinstance(call.func, ast.Attribute)
            key, method = key_of(call.func.value), call.func.attr
            if key not in self._scaler_names():
                continue
            if method in ("update", "unscale_") and isinstance(self.script.parents[call], ast.Expr):
                self.rewriter.delete(self.script.statement(call), _AMP)
            elif method == "step" and call.args:
                self.rewriter.replace(call, call.args[0], ".step()", reason=_AMP)
            elif method != "scale":
                kept.add(str(key))
                self.rewriter.note(call, f"{key} is not used any more: the loss scale is accelerator.scaler, which save_state saves.")
        for key, _, statement in self.script.assignments():
            if key not in self.scalers or kept:
                continue
            others = [node for node in self._loads(key) if not isinstance(self.script.parents[node], ast.Attribute)]
            if all(self._drop_argument(node) for node in others):
                self.rewriter.delete(statement, _AMP)
            else:
                told = "is not used any more: the Accelerator holds the loss scale. Remove it, and where it is passed on"
                self.rewriter.note(statement, f"{key} {told}.")

    def _loads(self, key: Key) -> list[ast.AST]:
        found = [node for node in self.script.nodes if key_of(node) == key and isinstance(getattr(node, "ctx", None), ast.Load)]
        return [node for node in found if not self.rewriter.is_deleted(node)]

    def _drop_argument(self, node: ast.AST) -> bool:
        """Remove an argument that a function of this script takes under the same name; return whether that was possible."""
        call = self.script.parents[node]
        if not isinstance(call, ast.Call) or node not in call.args or not isinstance(call.func, ast.Name):
            return False
        place = call.args.index(node)
        functions = [found for found in self.script.tree.body if isinstance(found, ast.FunctionDef) and found.name == call.func.id]
        calls = [found for found in self.script.nodes if isinstance(found, ast.Name) and found.id == call.func.id]
        if len(functions) != 1 or len(calls) != 1 or any(isinstance(given, ast.Starred) for given in call.args):
            return False
        parameters = functions[0].args.args
        if place >= len(parameters) or parameters[place].arg != key_of(node) or functions[0].args.defaults:
            return False
        self.rewriter.remove_argument(call, node, _AMP)
        self.rewriter.remove_from(parameters, parameters[place], _AMP)
        return True

    def _scaler_names(self) -> set[Key]:
        """Return the variables of scalers, and parameters of functions with their names."""
        return self.scalers | {key.rpartition(".")[2] for key in self.scalers} | {f"self.{key}" for key in self.scalers if "." not in key}

    # steps

    def _backward(self) -> None:
        for call in self.script.calls(".backward"):
            assert isinstance(call.func, ast.Attribute)
            loss = call.func.value
            if self.script.qualified(loss) is not None or key_of(loss) == "self":
                if self.script.qualified(call.func) == "torch.autograd.backward":
                    self.rewriter.note(call, "write accelerator.backward(loss) instead of torch.autograd.backward.")
                continue
            if call.args or (key_of(loss) or "").endswith("accelerator"):
                if call.args and not (key_of(loss) or "").endswith(("accelerator", "engine")):
                    self.rewriter.note(call, "backward with a gradient stays as it is: the gradients of these parameters are not averaged.")
                continue
            if self._is_scaled(loss) and self.converts_precision:
                assert isinstance(loss, ast.Call)
                loss = loss.args[0]
            rest: list[Part] = []
            for keyword in call.keywords:
                rest += [", ", keyword]
            self.rewriter.replace(call, self.accelerator(call), ".backward(", loss, *rest, ")", reason=_BACKWARD)

    def _is_scaled(self, loss: ast.expr) -> bool:
        if not isinstance(loss, ast.Call) or not isinstance(loss.func, ast.Attribute) or not loss.args:
            return False
        return loss.func.attr == "scale" and key_of(loss.func.value) in self._scaler_names()

    def _accumulation(self) -> None:
        """Change `model.no_sync()` and `model.require_backward_grad_sync = ...`."""
        reason = "the Accelerator says when gradients are averaged"
        for node in self.script.nodes:
            if isinstance(node, ast.Attribute) and node.attr == "no_sync" and key_of(node.value) is not None:
                if (key_of(node.value) or "").endswith("accelerator"):
                    continue
                parent = self.script.parents[node]
                base = self.accelerator(node)
                if isinstance(parent, ast.Call) and parent.func is node:
                    self.rewriter.replace(parent, base, ".no_sync(", node.value, ")", reason=reason)
                else:
                    self.rewriter.replace(node, "(lambda: ", base, ".no_sync(", node.value, "))", reason=reason)
            elif isinstance(node, ast.Assign):
                target = node.targets[0]
                if isinstance(target, ast.Attribute) and target.attr == "require_backward_grad_sync":
                    self._wrap_backward(node, target.value, reason)

    def _wrap_backward(self, node: ast.Assign, model: ast.expr, reason: str) -> None:
        """Put the backward pass that follows under `no_sync`, unless the condition says that gradients are averaged."""
        following = next(self._following(node), None)
        if following is None:
            self.rewriter.note(node, "put the backward passes that should not average gradients under `with accelerator.no_sync(model):`.")
            return
        self.rewriter.delete(node, reason)
        nothing = next((name for name, home in self.script.imported.items() if home == "contextlib.nullcontext"), None)
        if nothing is None:
            self.placement.imports.add(("contextlib", ""))
            nothing = "contextlib.nullcontext"
        condition = self.script.segment(node.value)
        base = self.accelerator(following)
        header: tuple[Part, ...] = (f"with {nothing}() if ", condition, " else ", base, ".no_sync(", model, "):")
        self.rewriter.indent_block([following], header, reason)

    def _following(self, node: ast.stmt) -> Iterator[ast.stmt]:
        """Return the statements after a node, in its block and those around it, that call backward."""
        statement: ast.AST = node
        while isinstance(statement, ast.stmt) and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            block: Iterable[ast.stmt] = self.script.block(statement)
            for other in block:
                if other.lineno > statement.lineno and isinstance(other, ast.Expr) and self.script.is_call(other.value, ".backward"):
                    yield other
            statement = self.script.parents[statement]
