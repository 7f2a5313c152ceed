"""Rules for scripts that are written for Accelerate: imports, arguments that moved, variables, and what differs.

Names are looked up in `slipstream.public_names`, so a name that lives elsewhere is imported from there, and one that Slipstream does not
have stays as it is, with a note that says what to use instead.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from slipstream.migrate.edits import Rewriter
from slipstream.migrate.imports import add_imports
from slipstream.migrate.source import Script, key_of
from slipstream.public_names import MODULES, explain_missing, find_home, names_of

__all__ = ["ABSENT_ATTRIBUTES", "rewrite_accelerate", "uses_accelerate"]

_OTHER: Final = "accelerate"
_OURS: Final = "slipstream"
_PUBLIC: Final = ("utils", "logging", "tracking", "hooks", "inference")
"""Modules below the package that are files."""

ABSENT_ATTRIBUTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "context_parallel_rank": "there is no context parallelism in this version",
        "deepspeed_plugin": "there is no DeepSpeed in this version; accelerator.state.deepspeed_plugin is None",
        "deepspeed_ulysses_dl_adapter": "there is no DeepSpeed in this version",
        "lomo_backward": "there is no LOMO in this version; use an optimizer of torch.optim",
        "pipeline_parallel_rank": "pipelines are for inference only in this version: slipstream.inference.prepare_pippy",
        "should_save_model": "write accelerator.is_main_process; save_model and save_state know by themselves who writes",
        "tensor_parallel_rank": "there is no tensor parallelism in this version",
    }
)
"""Attributes of Accelerate's Accelerator that ours does not have, and what to do."""

_MOVED_ARGUMENTS: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(("dispatch_batches", "even_batches", "use_seedable_sampler", "use_stateful_dataloader"), "DataLoaderConfiguration")
)
_SCHEDULE: Final = "prepared schedulers keep their speed on several processes"


def uses_accelerate(script: Script) -> bool:
    """Return whether a script imports Accelerate."""
    return any(name.split(".")[0] == _OTHER for name in script.imported.values())


def rewrite_accelerate(rewriter: Rewriter) -> None:
    """Add the changes that move a script from Accelerate to Slipstream."""
    script = rewriter.script
    needed: set[str] = set()
    accelerators = _accelerators(script)
    for node in script.nodes:
        if isinstance(node, ast.Import):
            _rewrite_import(rewriter, node)
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == _OTHER:
            _rewrite_import_from(rewriter, node)
        elif isinstance(node, ast.Attribute):
            _rewrite_attribute(rewriter, node, accelerators)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            _rewrite_variable(rewriter, node)
    for call in script.calls(f"{_OTHER}.Accelerator", f"{_OTHER}.accelerator.Accelerator"):
        _rewrite_accelerator(rewriter, call, needed)
    add_imports(rewriter, [("slipstream.utils", name) for name in needed if name not in script.imported])
    _note_differences(rewriter)


def _rewrite_import(rewriter: Rewriter, node: ast.Import) -> None:
    for alias in node.names:
        first, dot, rest = alias.name.partition(".")
        if first != _OTHER:
            continue
        if not dot or rest in (*MODULES, *_PUBLIC, "accelerator"):
            start = rewriter.script.span(alias)[0]
            rewriter.replace_span(start, start + len(_OTHER), _OURS, reason="the package is slipstream")
        else:
            rewriter.note(node, f"slipstream has no module {rest}. Import the names that you use from slipstream or slipstream.utils.")


def _rewrite_import_from(rewriter: Rewriter, node: ast.ImportFrom) -> None:
    """Change `from accelerate... import ...`; names that live elsewhere get a line of their own, missing ones stay."""
    assert node.module is not None
    script = rewriter.script
    module = node.module.replace(_OTHER, _OURS, 1)
    homes = {alias: _home(module, alias.name) for alias in node.names}
    reason = "the names of Accelerate are in slipstream"
    if all(home == module for home in homes.values()):
        start = script.text.index(_OTHER, script.span(node)[0])
        rewriter.replace_span(start, start + len(_OTHER), _OURS, reason=reason)
        return
    lines: dict[str, list[str]] = {}
    for alias, home in homes.items():
        if home is None:
            told = explain_missing(module, alias.name) or f"{module} has no {alias.name}."
            rewriter.note(alias, f"{told} The import stays as it is.")
        lines.setdefault(home or node.module, []).append(script.segment(alias))
    if list(lines) == [node.module]:
        return
    indent = script.indent(node)
    texts = [f"from {home} import {', '.join(names)}" for home, names in lines.items()]
    moved = [home for home in lines if home not in (module, node.module)]
    reason += f"; some live in {', '.join(moved)}" if moved else ""
    rewriter.replace(node, f"{script.newline}{indent}".join(texts), reason=reason)


def _home(module: str, name: str) -> str | None:
    """Return the module to import a name from: the same one if it has it."""
    path = module.removeprefix(f"{_OURS}.")
    if name == "*" or (path in MODULES and name in names_of(path)):
        return module
    if module in (_OURS, f"{_OURS}.utils") and name in importlib.import_module(module).__all__:
        return module
    if module == _OURS and (name in MODULES or name in _PUBLIC):
        return module
    home = find_home(name)
    if home is None or home == _OURS or home.removeprefix(f"{_OURS}.") in _PUBLIC:
        return home
    return next((f"{_OURS}.{path}" for path, names in MODULES.items() if name in names.split()), home)


def _rewrite_attribute(rewriter: Rewriter, node: ast.Attribute, accelerators: set[str]) -> None:
    """Change `accelerate.utils.set_seed`, and tell of attributes of an Accelerator that are not here."""
    script = rewriter.script
    parent = script.parents[node]
    key = key_of(node) or ""
    if isinstance(node.value, ast.Name) and node.value.id in accelerators and node.attr in ABSENT_ATTRIBUTES:
        rewriter.note(node, f"{key} is not in slipstream: {ABSENT_ATTRIBUTES[node.attr]}.")
    if isinstance(parent, ast.Attribute):  # only the whole chain
        return
    name = script.qualified(node)
    if name is not None and name.split(".")[0] == _OTHER and "accelerate" in script.imported and key.startswith(f"{_OTHER}."):
        module, _, last = name.replace(_OTHER, _OURS, 1).rpartition(".")
        home = module if "Accelerator." in name else _home(module, last)
        if home is None and "." in module:
            module, _, last = module.rpartition(".")
            home = _home(module, last)
        if home is None:
            rewriter.note(node, explain_missing(module, last) or f"slipstream has no {key.removeprefix(_OTHER + '.')}.")
        start = script.span(node)[0]
        rewriter.replace_span(start, start + len(_OTHER), _OURS, reason="the package is slipstream")


def _accelerators(script: Script) -> set[str]:
    """Return the variables that hold an Accelerator, by what they are assigned."""
    found = {"accelerator"}
    for key, value, _ in script.assignments():
        if isinstance(value, ast.Call) and (script.qualified(value.func) or "").endswith(".Accelerator"):
            found.add(key)
    return found


def _rewrite_variable(rewriter: Rewriter, node: ast.Constant) -> None:
    """Change the names of Accelerate's environment variables where ours has the same option."""
    from slipstream.config.schema import OPTIONS

    value = node.value
    assert isinstance(value, str)
    if not value.startswith("ACCELERATE_") or not value.replace("_", "").isalnum() or not value.isupper():
        return
    option = value.removeprefix("ACCELERATE_").lower()
    option = {"use_cpu": "cpu", "gradient_accumulation_steps": "gradient_accumulation_steps"}.get(option, option)
    if value == "ACCELERATE_USE_FSDP":
        return  # read as it is
    if option in OPTIONS:
        rewriter.replace(node, repr(f"SLIPSTREAM_{option.upper()}").replace("'", '"'), reason="variables begin with SLIPSTREAM_")
    else:
        told = "is a variable of Accelerate's launcher that Slipstream does not read. `slipstream launch --help` lists the options"
        rewriter.note(node, f"{value} {told}.")


def _rewrite_accelerator(rewriter: Rewriter, call: ast.Call, needed: set[str]) -> None:
    """Change arguments of `Accelerator(...)` that moved, and keep the meaning of prepared schedulers."""
    script = rewriter.script
    by_name = {keyword.arg: keyword for keyword in call.keywords if keyword.arg}
    moved = [by_name[name] for name in _MOVED_ARGUMENTS if name in by_name]
    if moved and "dataloader_config" not in by_name:
        inner = ", ".join(script.segment(keyword) for keyword in moved)
        reason = "options of loaders are in DataLoaderConfiguration"
        rewriter.replace(moved[0], f"dataloader_config=DataLoaderConfiguration({inner})", reason=reason)
        for keyword in moved[1:]:
            rewriter.remove_argument(call, keyword, reason)
        needed.add("DataLoaderConfiguration")
    elif moved:
        rewriter.note(call, f"move {', '.join(str(keyword.arg) for keyword in moved)} into the DataLoaderConfiguration of this call.")
    if "fp16" in by_name and "mixed_precision" not in by_name:
        value = script.segment(by_name["fp16"].value)
        text = '"fp16"' if value == "True" else f'"fp16" if {value} else "no"'
        rewriter.replace(by_name["fp16"], f"mixed_precision={text}", reason="the precision is one option")
    if "logging_dir" in by_name:
        _move_logging_dir(rewriter, call, by_name, needed)
    for name in ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin"):
        if name in by_name and not _is_none(by_name[name].value):
            told = "is for an engine that is not in this version: remove it, and see docs/sharded.md for FSDP"
            rewriter.note(by_name[name].value, f"{name} {told}.")
    _keep_schedule(rewriter, call, by_name)


def _move_logging_dir(rewriter: Rewriter, call: ast.Call, by_name: Mapping[str, ast.keyword], needed: set[str]) -> None:
    keyword = by_name["logging_dir"]
    value = rewriter.script.segment(keyword.value)
    if "project_config" in by_name or "project_dir" in by_name:
        rewriter.note(keyword.value, "move logging_dir into project_config=ProjectConfiguration(logging_dir=...).")
        return
    text = f"project_config=ProjectConfiguration(project_dir={value}, logging_dir={value})"
    rewriter.replace(keyword, text, reason="folders of a run are in ProjectConfiguration")
    needed.add("ProjectConfiguration")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _keep_schedule(rewriter: Rewriter, call: ast.Call, by_name: Mapping[str, ast.keyword]) -> None:
    """Add `scheduler_steps_per_process=True` where a scheduler is prepared, unless the script says how it moves."""
    script = rewriter.script
    if by_name.keys() & {"scheduler_steps_per_process", "step_scheduler_with_optimizer", "split_batches"}:
        return
    if not _prepares_scheduler(script):
        return
    if any(keyword.arg is None for keyword in call.keywords):
        rewriter.note(call, f"add scheduler_steps_per_process=True to these arguments: {_SCHEDULE}.")
        return
    end = script.span(call)[1] - 1
    arguments = sorted((*call.args, *call.keywords), key=lambda found: script.span(found)[0])
    text = "scheduler_steps_per_process=True"
    if not arguments:
        rewriter.replace_span(end, end, text, reason=_SCHEDULE)
        return
    last = script.span(arguments[-1])[1]
    rewriter.replace_span(last, last, f", {text}", reason=_SCHEDULE)


def _prepares_scheduler(script: Script) -> bool:
    """Whether something that looks like a scheduler is given to `prepare`."""
    for call in script.calls(".prepare", ".prepare_scheduler"):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "prepare_scheduler":
            return True
        for argument in call.args:
            name = (key_of(argument) or "").lower()
            if "schedul" in name or name in ("lr_sched", "sched"):
                return True
    return False


def _note_differences(rewriter: Rewriter) -> None:
    """Tell, once per script, of defaults that differ where the script depends on them."""
    script = rewriter.script
    for line, text in _differences(script):
        rewriter.note(line, text)


def _differences(script: Script) -> Iterator[tuple[int, str]]:
    prepared = next(script.calls(".prepare", ".prepare_data_loader"), None)
    if prepared is not None and "even_batches" not in script.text and "uneven" not in script.text:
        yield (
            prepared.lineno,
            "a short last batch is shared out as it is, and no sample is repeated. "
            "Accelerate completes it with repeated samples; DataLoaderConfiguration(even_batches=True) does so, too.",
        )
    if prepared is not None and _prepares_scheduler(script) and not any(True for _ in script.calls(f"{_OTHER}.Accelerator")):
        yield prepared.lineno, f"add scheduler_steps_per_process=True where the Accelerator is made: {_SCHEDULE}."
    launcher = next(script.calls(f"{_OTHER}.notebook_launcher", f"{_OTHER}.launchers.notebook_launcher"), None)
    if launcher is not None and len(launcher.args) < 3 and all(keyword.arg != "num_processes" for keyword in launcher.keywords):
        yield launcher.lineno, "notebook_launcher needs num_processes here: write how many."
    launch = next((number for number, line in enumerate(script.text.splitlines(), 1) if "accelerate launch" in line), None)
    if launch is not None:
        yield launch, "this text says `accelerate launch`; the command is `slipstream launch`, with the same options."
