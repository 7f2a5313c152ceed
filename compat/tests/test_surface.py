"""The whole public surface of Accelerate 1.15 (`surface.json`, written by `make_surface.py`): names, parameters, defaults, and no
parameter that is accepted and ignored."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import runpy
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make_surface import OPAQUE, parameters, plain

from slipstream.errors import SlipstreamError

SURFACE: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "surface.json").read_text(encoding="utf-8"))

INSTANCE_ATTRIBUTES = {"accelerate.optimizer.AcceleratedOptimizer.step_was_skipped", "accelerate.state.AcceleratorState.fork_launched"}
"""Properties there that are attributes of an object here."""
BUILT_IN = {
    "accelerate.commands.launch.CustomHelpFormatter",
    "accelerate.commands.utils.CustomArgumentParser",
    "accelerate.test_utils.testing.SubprocessCallException",
    "accelerate.utils.operations.CannotPadNestedTensorWarning",
    "accelerate.utils.operations.DistributedOperationException",
}
"""Classes whose constructor is that of argparse or of an exception of Python."""
DECORATED = {"accelerate.accelerator.Accelerator.init_trackers", "accelerate.accelerator.Accelerator.log"}
"""Methods that a decorator hides behind `*args, **kwargs` in Accelerate; their parameters here are those that it documents."""


def modules() -> list[str]:
    return sorted(SURFACE)


def load(path: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # accelerate.memory_utils
        return importlib.import_module(path)


def is_placeholder(value: Any) -> bool:
    """Whether this is a name of an engine that is not supported: using it raises."""
    return str(getattr(value, "__doc__", "")).startswith("Not supported.")


# -- names, parameters, defaults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", modules())
def test_every_name_exists(path: str) -> None:
    module = load(path)
    assert [name for name in SURFACE[path] if not hasattr(module, name)] == []
    assert [name for name in SURFACE[path] if name not in dir(module)] == []


@pytest.mark.parametrize("path", modules())
def test_every_parameter_exists_with_its_default(path: str) -> None:
    module, wrong = load(path), []
    for where, wanted, function in callables(module, path):
        wrong += [f"{where}: {problem}" for problem in compare(wanted, function)]
    assert wrong == []


@pytest.mark.parametrize("path", modules())
def test_every_member_and_value_is_the_same(path: str) -> None:
    module, wrong = load(path), []
    for name, entry in SURFACE[path].items():
        value = getattr(module, name)
        if entry["kind"] == "enum":
            members = {member: getattr(getattr(value, member, None), "value", None) for member in entry["members"]}
            if members != entry["members"]:
                wrong.append(f"{name}: {members}")
        elif entry["kind"] == "constant" and entry["value"] not in (OPAQUE, plain(value)):
            wrong.append(f"{name} = {value!r}")
    assert wrong == []


@pytest.mark.parametrize("path", modules())
def test_every_property_exists(path: str) -> None:
    module, wrong = load(path), []
    for name, entry in SURFACE[path].items():
        kind = getattr(module, name)
        for own, access in entry.get("properties", {}).items():
            where = f"{path}.{name}.{own}"
            found = inspect.getattr_static(kind, own, OPAQUE)
            if is_placeholder(kind) or where in INSTANCE_ATTRIBUTES:
                continue
            if found is OPAQUE and own not in getattr(kind, "__annotations__", {}):
                wrong.append(f"{where} is missing")
            elif access == "settable" and isinstance(found, property) and found.fset is None:
                wrong.append(f"{where} cannot be set")
    assert wrong == []


def callables(module: Any, path: str) -> Iterator[tuple[str, list[list[Any]], Any]]:
    """Yield every function, constructor and method that takes named parameters, with those of Accelerate."""
    for name, entry in SURFACE[path].items():
        value, where = getattr(module, name), f"{path}.{name}"
        if is_placeholder(value) or where in BUILT_IN:
            continue
        if entry.get("parameters") is not None:
            yield where, entry["parameters"], value
        for method, wanted in entry.get("methods", {}).items():
            if f"{where}.{method}" not in DECORATED:
                yield f"{where}.{method}", wanted, getattr(value, method, None)


def compare(wanted: list[list[Any]], function: Any) -> list[str]:
    if function is None:
        return ["is missing"]
    found = parameters(function)
    kinds, known = [entry[1] for entry in found], {entry[0]: entry for entry in found}
    if kinds == ["VAR_POSITIONAL", "VAR_KEYWORD"] and len(wanted) != 2:
        return raises_when_called(function)
    wrong = []
    for name, kind, *default in wanted:
        if kind.startswith("VAR_"):
            wrong += [] if kind in kinds else [f"takes no {kind}"]
        elif name not in known:
            wrong.append(f"has no {name}")
        elif default and known[name][2:] != default and default != [OPAQUE]:
            wrong.append(f"{name}={known[name][2:]} and not {default[0]!r}")
    order = [entry[0] for entry in wanted if entry[1] == "POSITIONAL_OR_KEYWORD"]
    if [entry[0] for entry in found if entry[1] == "POSITIONAL_OR_KEYWORD"][: len(order)] != order:
        wrong.append(f"takes positional arguments in another order than {order}")
    return wrong


def raises_when_called(function: Any) -> list[str]:
    try:
        function()
    except (SlipstreamError, NotImplementedError):
        return []
    return ["takes anything, and does not raise"]


# -- what is not supported says so --------------------------------------------------------------------------------------


def placeholders() -> list[str]:
    return [f"{path}:{name}" for path in modules() for name in SURFACE[path] if is_placeholder(getattr(load(path), name))]


def test_what_is_not_supported_raises_where_it_is_used() -> None:
    from accelerate._unsupported import UnsupportedError

    found = placeholders()
    assert len(found) > 30
    for entry in found:
        path, _, name = entry.partition(":")
        with pytest.raises(UnsupportedError, match=r"Slipstream"):
            getattr(load(path), name)()


@pytest.mark.parametrize("path", ["accelerate", "accelerate.utils", "accelerate.state", "accelerate.utils.operations", "accelerate.hooks"])
def test_a_name_that_accelerate_lacks_is_an_attribute_error(path: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{path}' has no attribute 'nonsense'"):
        _ = load(path).nonsense
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec(f"from {path} import nonsense")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{path}.nonsense")


def test_importing_a_star_gives_the_names() -> None:
    found: dict[str, Any] = {}
    exec("from accelerate import *", found)
    assert {name for name, entry in SURFACE["accelerate"].items() if entry["kind"] != "module"} <= set(found)


# -- no parameter is accepted and ignored -------------------------------------------------------------------------------

RAISES = "raises, whatever is passed"
HOOK = "a method for subclasses, which does nothing by itself"
NO_EFFECT = {
    "accelerate.accelerator.Accelerator.deepspeed_ulysses_dl_adapter(dl, model)": RAISES,
    "accelerate.accelerator.Accelerator.lomo_backward(loss, learning_rate)": RAISES,
    "accelerate.accelerator.Accelerator.maybe_context_parallel(buffer_seq_dims, no_restore_buffers)": "about `buffers`; of which it warns",
    "accelerate.commands.launch.deepspeed_launcher(args)": RAISES,
    "accelerate.commands.launch.sagemaker_launcher(sagemaker_config, args)": RAISES,
    "accelerate.commands.launch.tpu_launcher(args)": RAISES,
    "accelerate.commands.launch.tpu_pod_launcher(args)": RAISES,
    "accelerate.hooks.AlignDevicesHook.post_forward(module)": "what it needs of the module it has since `init_hook`",
    "accelerate.hooks.ModelHook.post_forward(module)": HOOK,
    "accelerate.hooks.ModelHook.pre_forward(module)": HOOK,
    "accelerate.state.do_nothing(args, kwargs)": "does nothing, which is what it is for",
    "accelerate.tracking.GeneralTracker.log(values, step, kwargs)": HOOK,
    "accelerate.tracking.GeneralTracker.store_init_configuration(values)": HOOK,
    "accelerate.utils.dataclasses.FP8RecipeKwargs.__init__(args, kwargs)": RAISES,
    "accelerate.utils.dataclasses.MSAMPRecipeKwargs.__init__(args, kwargs)": RAISES,
    "accelerate.utils.dataclasses.TERecipeKwargs.__init__(args, kwargs)": RAISES,
    "accelerate.utils.launch.prepare_deepspeed_cmd_env(args)": RAISES,
    "accelerate.utils.launch.prepare_sagemager_args_inputs(sagemaker_config, args)": RAISES,
    "accelerate.utils.launch.prepare_tpu(args, current_env, pod)": RAISES,
    "accelerate.utils.operations.GatheredParameters(params, modifier_rank, fwd_module, enabled)": "about parameters that DeepSpeed shards",
    "accelerate.utils.operations.slice_tensors(process_index, num_processes)": "for functions of scripts in its place; it needs neither",
}
"""The parameters that no line of their function reads, and why that is right."""


def unread(function: Any) -> list[str]:
    """Return the parameters that the body of a function never names."""
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(function, "__func__", function))))
    except (OSError, TypeError, SyntaxError):  # generated, as the constructor of a dataclass, or of C
        return []
    body = tree.body[0]
    if not isinstance(body, ast.FunctionDef):
        return []
    own = [argument.arg for argument in (*body.args.posonlyargs, *body.args.args, *body.args.kwonlyargs)]
    own += [argument.arg for argument in (body.args.vararg, body.args.kwarg) if argument is not None]
    read = {node.id for statement in body.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return [] if "locals" in read else [name for name in own if name not in read and name not in ("self", "cls")]


def test_every_parameter_is_read() -> None:
    found = set()
    for path in modules():
        module = load(path)
        for name, entry in SURFACE[path].items():
            value, where = getattr(module, name), f"{path}.{name}"
            if entry["kind"] not in ("function", "class") or is_placeholder(value):
                continue
            methods = ("__init__", *entry.get("methods", {}))
            own = [("", value)] if entry["kind"] == "function" else [(f".{method}", getattr(value, method, None)) for method in methods]
            for suffix, function in own:
                ignored = unread(function) if callable(function) else []
                if ignored:
                    found.add(f"{where}{suffix}({', '.join(ignored)})")
    assert found == set(NO_EFFECT)


def test_the_page_of_the_names_is_current() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = runpy.run_path(str(docs / "drop_in_names_page.py"))["names_page"]()
    assert (docs / "drop-in-names.md").read_text(encoding="utf-8") == page, "run: python docs/drop_in_names_page.py > docs/drop-in-names.md"


def test_the_table_is_of_this_release() -> None:
    """The facts were taken from 1.15, and the drop-in says that it is that version."""
    import accelerate

    assert accelerate.__version__.partition("+")[0] == "1.15.0"
    assert sum(map(len, SURFACE.values())) > 800
