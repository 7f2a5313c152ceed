"""`torch.compile`, for the whole model or by region, before `prepare` or by it.

Models are compiled in place (as by `nn.Module.compile`), so the object, its class and its state-dict keys stay. A model that the user
compiled before `prepare` keeps its settings. A backend that this torch does not have is an error. By region, each block of a list of
blocks is compiled and equal blocks share one compilation, so a deep model starts as fast as one block.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, cast

import torch

from slipstream.config.handlers import KwargsHandler
from slipstream.devices.table import StringEnum
from slipstream.errors import ConfigError
from slipstream.logging import get_logger
from slipstream.precision.autocast import transfer_hooks

if TYPE_CHECKING:
    from slipstream.config.schema import Compute

__all__ = [
    "DynamoBackend",
    "TorchDynamoPlugin",
    "compile_model",
    "compile_regions",
    "compile_regions_fsdp2",
    "complete_plugin",
    "has_compiled_regions",
    "has_repeated_blocks",
    "is_compile_wrapper",
    "is_compiled_module",
    "is_repeated_blocks",
    "compile_in_place",
    "replace_submodules",
]


class DynamoBackend(StringEnum):
    """Backends of `torch.compile` by the names that scripts use. Those that this torch does not have are refused when they are used.

    >>> str(DynamoBackend.INDUCTOR)
    'INDUCTOR'
    """

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """How `prepare` compiles models. None takes a value from the other sources (launcher, environment, file).

    >>> TorchDynamoPlugin(backend="eager", fullgraph=True).to_kwargs()
    {'backend': 'eager', 'fullgraph': True}
    """

    backend: DynamoBackend | str | Callable[..., Any] | None = None
    """A name of `DynamoBackend` or of `torch._dynamo.list_backends`, or a function as torch.compile takes it; NO: nothing is compiled."""
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None
    """Compile the repeated blocks of a model, each kind once, instead of the whole."""

    def __post_init__(self) -> None:
        if self.backend is not None and not isinstance(self.backend, (str, DynamoBackend)) and not callable(self.backend):
            raise ConfigError(f"TorchDynamoPlugin(backend={self.backend!r}): write the name of a backend, such as 'inductor'")
        if isinstance(self.backend, str) and self.backend.upper() in DynamoBackend:
            self.backend = DynamoBackend(self.backend.upper())
        if self.mode is not None and self.options is not None:
            raise ConfigError(
                f"TorchDynamoPlugin(mode={self.mode!r}, options={self.options!r}): a mode is a set of options, "
                "and torch.compile takes one or the other"
            )

    @property
    def compiles(self) -> bool:
        """Whether there is anything to do."""
        return self.backend is not None and self.backend != DynamoBackend.NO and not self.disable

    def to_dict(self) -> dict[str, Any]:
        """Return all fields; the backend by the name that torch knows it by."""
        return {**{field_.name: getattr(self, field_.name) for field_ in dataclasses.fields(self)}, "backend": _torch_name(self.backend)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that were set."""
        given = {name: value for name, value in self.to_dict().items() if name != "use_regional_compilation"}
        return {name: value for name, value in given.items() if value is not None and (value is not False or name == "dynamic")}


def complete_plugin(plugin: TorchDynamoPlugin | None, compute: Compute) -> TorchDynamoPlugin:
    """Return a plugin with what it leaves open taken from the options `dynamo_*`.

    >>> from slipstream.config.schema import Compute
    >>> complete_plugin(None, Compute(dynamo_backend="eager", dynamo_use_fullgraph=True)).to_kwargs()
    {'backend': 'eager', 'fullgraph': True}
    """
    plugin = plugin or TorchDynamoPlugin()
    mode = compute.dynamo_mode if compute.dynamo_mode != "default" and plugin.options is None else None
    return dataclasses.replace(
        plugin,
        backend=compute.dynamo_backend if plugin.backend is None else plugin.backend,
        mode=mode if plugin.mode is None else plugin.mode,
        fullgraph=compute.dynamo_use_fullgraph if plugin.fullgraph is None else plugin.fullgraph,
        # The option False means "not from the start"; torch still goes over to changing shapes when it sees some.
        dynamic=(compute.dynamo_use_dynamic or None) if plugin.dynamic is None else plugin.dynamic,
        use_regional_compilation=compute.dynamo_use_regional_compilation
        if plugin.use_regional_compilation is None
        else plugin.use_regional_compilation,
    )


def compile_model(model: torch.nn.Module, plugin: TorchDynamoPlugin) -> torch.nn.Module:
    """Compile a model in place as the plugin says, and return it. One that is compiled already keeps its settings.

    >>> model = torch.nn.Linear(2, 2)
    >>> compile_model(model, TorchDynamoPlugin(backend="eager")) is model, is_compiled_module(model)
    (True, True)
    """
    if not plugin.compiles:
        return model
    _check_backend(plugin.backend)
    compiled = [module for module in model.modules() if is_compiled_module(module)]
    if compiled and all(getattr(_compiled_call(module), _PLUGIN_ATTRIBUTE, None) == plugin for module in compiled):
        return model  # by an earlier call
    if compiled:
        get_logger(__name__).warning_once(
            f"{type(model).__name__} is compiled already, with settings of its own: those of TorchDynamoPlugin are not used for it. "
            "Leave torch.compile out of the script to use them."
        )
        return model
    if not plugin.use_regional_compilation:
        _compile_call(model, torch.compile, **plugin.to_kwargs())
    else:
        if not has_repeated_blocks(model):
            get_logger(__name__).warning_once(
                f"{type(model).__name__} has no list of blocks of one class to compile by region: it is compiled as a whole"
            )
        compile_regions(model, **plugin.to_kwargs())
    for module in filter(is_compiled_module, model.modules()):
        setattr(_compiled_call(module), _PLUGIN_ATTRIBUTE, plugin)
    return model


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile the repeated blocks of a module in place, each kind once, and return it; one without such blocks is compiled as a whole.

    >>> model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    >>> compile_regions(model, backend="eager") is model, is_compiled_module(model), is_compiled_module(model[0])
    (True, False, True)
    """
    if not has_repeated_blocks(module):
        _compile_call(module, torch.compile, **compile_kwargs)
        return module
    for block in _outermost_blocks(module, set()):
        _compile_call(block, torch.compile, **compile_kwargs)
    return module


def compile_regions_fsdp2(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Do what `compile_regions` does, which fits sharded models too: it compiles in place, so parameters and optimizers stay.

    >>> model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    >>> compile_regions_fsdp2(model, backend="eager") is model, is_compiled_module(model[0])
    (True, True)
    """
    return compile_regions(module, **compile_kwargs)


def is_compiled_module(module: Any) -> bool:
    """Return whether a module is compiled, by `torch.compile(module)` or in place."""
    return is_compile_wrapper(module) or (isinstance(module, torch.nn.Module) and _compiled_call(module) is not None)


def is_compile_wrapper(module: Any) -> bool:
    """Return whether this is the wrapper that `torch.compile(module)` returns; torch._dynamo is not imported to find out."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_compiled_regions(module: Any) -> bool:
    """Return whether any module inside of this one is compiled."""
    if not isinstance(module, torch.nn.Module):
        return False
    return any(is_compiled_module(inner) for inner in module.modules() if inner is not module)


def is_repeated_blocks(module: Any) -> bool:
    """Return whether this is a list of blocks of one class (a Sequential of at least two of them counts too).

    >>> is_repeated_blocks(torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])), is_repeated_blocks(torch.nn.Linear(2, 2))
    (True, False)
    """
    if not isinstance(module, _BLOCK_LISTS):
        return False
    kinds = {type(block) for block in module}
    enough = 2 if isinstance(module, torch.nn.Sequential) else 1
    return len(kinds) == 1 and len(module) >= enough and not issubclass(kinds.pop(), _CONTAINERS)


def has_repeated_blocks(module: Any) -> bool:
    """Return whether there is such a list anywhere in this module."""
    return isinstance(module, torch.nn.Module) and any(is_repeated_blocks(inner) for inner in module.modules())


def compile_in_place(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's own module of what `torch.compile(model)` made, compiled in place with the same settings; so for submodules.

    So that state-dict keys never show the wrapper, and what is installed on the model is part of what is compiled.

    >>> model = torch.nn.Linear(2, 2)
    >>> wrapped = torch.compile(model, backend="eager")
    >>> compile_in_place(wrapped) is model, is_compiled_module(model), list(wrapped.state_dict())[0]
    (True, True, '_orig_mod.weight')
    """
    model = _compile_module_in_place(model)
    replace_submodules(model, _compile_module_in_place, set())
    return model


_PLUGIN_ATTRIBUTE = "_slipstream_plugin"
_BLOCK_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
_CONTAINERS = (*_BLOCK_LISTS, torch.nn.ModuleDict)


def _compiled_call(module: torch.nn.Module) -> Any:
    found = module._compiled_call_impl
    return getattr(found, "compiled_call", found)  # `TimedForward` stands before it


def _outermost_blocks(module: torch.nn.Module, seen: set[int]) -> list[torch.nn.Module]:
    found: list[torch.nn.Module] = []
    for child in module.children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        found += [child] if is_repeated_blocks(module) else _outermost_blocks(child, seen)
    return found


def _compile_module_in_place(model: torch.nn.Module) -> torch.nn.Module:
    if not is_compile_wrapper(model):
        return model
    wrapper: Any = model
    original = _compile_module_in_place(wrapper._orig_mod)
    transfer_hooks(wrapper, original)
    # torch internals: `_compiled_call_impl` and `dynamo_ctx` are what `nn.Module.compile` and `torch.compile` set (torch 2.13). With them
    # the user's settings survive. tests/parallel/test_compile.py notices a change; it can go when a wrapper tells its settings.
    _compile_call(original, wrapper.dynamo_ctx)
    return original


def _compile_call(module: torch.nn.Module, compiler: Callable[..., Any], **kwargs: Any) -> None:
    """Compile the calls of a module in place, as `module.compile` does, also if its class is one of torch's own."""
    # torch internals: Dynamo skips functions of torch.nn, so `torch.nn.Linear(2, 2).compile()` compiles nothing, without a word;
    # `torch.compile(module)` puts a function of its own before the call, and so does this (torch 2.13; tests/parallel/test_compile.py
    # notices; it can go when `Module.compile` does it).
    is_of_torch = type(module).forward.__module__.startswith("torch.")
    module._compiled_call_impl = compiler(_function_before_call(module) if is_of_torch else module._call_impl, **kwargs)


def _function_before_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module; one code object for each class, because Dynamo counts recompilations by code."""
    function = _call_function(module)
    kind: Any = type(module)
    return FunctionType(_code_for(kind), function.__globals__, function.__name__, None, function.__closure__)


@cache
def _code_for(kind: Any) -> CodeType:
    return _call_function(None).__code__.replace(co_name=f"call_{kind.__name__}")


def _call_function(module: Any) -> FunctionType:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    return cast(FunctionType, call)


def replace_submodules(parent: torch.nn.Module, replace: Callable[[torch.nn.Module], torch.nn.Module], seen: set[int]) -> None:
    """Put what `replace` returns in place of every submodule, outermost first; `seen` holds the identities of parents that are done."""
    if id(parent) in seen:
        return
    seen.add(id(parent))
    for name, child in list(parent._modules.items()):  # named_children() leaves out a module that is there twice
        if child is None:
            continue
        new = replace(child)
        if new is not child:
            parent.register_module(name, new)
        replace_submodules(new, replace, seen)


def _torch_name(backend: Any) -> Any:
    return str(backend.value).lower() if isinstance(backend, DynamoBackend) else backend


def _check_backend(backend: Any) -> None:
    name = _torch_name(backend)
    if isinstance(name, str) and name not in (known := torch._dynamo.list_backends(exclude_tags=None)):
        usual = ", ".join(name for name in known if name in ("eager", "aot_eager", *torch._dynamo.list_backends()))
        raise ConfigError(
            f"the backend {name!r} of TorchDynamoPlugin is none that torch {torch.__version__} has; write one of {usual}, "
            "or install the package that brings it and import it first"
        )
