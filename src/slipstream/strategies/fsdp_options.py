"""Options of sharded training: `FullyShardedDataParallelPlugin`, and the `ShardingOptions` that the strategy reads.

A field of the plugin that is not given is completed from the configuration (`fsdp_version`, `fsdp_offload_params` and the like), so an
argument is stronger than a flag, a flag than a variable, a variable than a file. Options of FSDP version 1 are translated to version 2,
with one warning that says what became what. `resolve_sharding` reads the plugin each time it is called: a field that a script changes
before `prepare` counts. The classes of `torch.distributed.fsdp` are imported on first use, because that takes half a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import torch

from slipstream.config.fsdp2 import WITHOUT_EFFECT
from slipstream.config.option import Origin, Value, parse
from slipstream.config.resolve import for_worker
from slipstream.config.schema import OPTIONS, RESHARD_OF, Sharding
from slipstream.errors import ConfigError
from slipstream.parallel.wrap_policy import plan_blocks

__all__ = ["FullyShardedDataParallelPlugin", "ShardingOptions", "resolve_sharding"]

_OPTION_OF: Final[Mapping[str, str]] = {
    "fsdp_version": "fsdp_version",
    "sharding_strategy": "fsdp_sharding_strategy",
    "reshard_after_forward": "fsdp_reshard_after_forward",
    "auto_wrap_policy": "fsdp_auto_wrap_policy",
    "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "min_num_params": "fsdp_min_num_params",
    "cpu_offload": "fsdp_offload_params",
    "ignored_modules": "fsdp_ignored_modules",
    "state_dict_type": "fsdp_state_dict_type",
    "sync_module_states": "fsdp_sync_module_states",
    "cpu_ram_efficient_loading": "fsdp_cpu_ram_efficient_loading",
    "activation_checkpointing": "fsdp_activation_checkpointing",
    "activation_checkpointing_offload": "fsdp_activation_checkpointing_offload",
    "backward_prefetch": "fsdp_backward_prefetch",
    "forward_prefetch": "fsdp_forward_prefetch",
    "use_orig_params": "fsdp_use_orig_params",
}
"""The option that completes each field of the plugin."""

_WITHOUT_EFFECT: Final = {
    **WITHOUT_EFFECT,
    "limit_all_gathers": "version 2 limits its memory without it",
    "state_dict_config": "state_dict_type says it all",
    "optim_state_dict_config": "state_dict_type says it all",
}
_AS_VERSION_2: Final = {("limit_all_gathers", True), ("use_orig_params", True), ("forward_prefetch", False)}
"""Values of such options that ask for nothing: what version 2 does anyway, or no prefetching on top of its own."""
_DTYPES: Final = {
    **{"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32},
    **{"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64},
}
_MIXED: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """What the sharding strategy reads; every field is decided."""

    auto_wrap_policy: str | Callable[..., bool] | None = None
    """"transformer_based_wrap", "size_based_wrap", "no_wrap", or a function of a module; None: find the blocks."""
    transformer_cls_names_to_wrap: tuple[str, ...] = ()
    min_num_params: int = 100_000_000
    reshard_after_forward: bool | int = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    cpu_offload: bool = False
    ignored_modules: tuple[torch.nn.Module, ...] | str | None = None
    """Modules, or a regular expression that matches the whole name of a module."""
    state_dict_type: str = "SHARDED_STATE_DICT"
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    cpu_ram_efficient_loading: bool = False
    sync_module_states: bool = True
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    hybrid: bool = False
    """A HYBRID_ strategy of version 1: shards within a machine, replicas across machines (see `resolve_mesh`)."""


@dataclass
class FullyShardedDataParallelPlugin:
    """Shard models over the processes: `Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(...))`.

    >>> plugin = FullyShardedDataParallelPlugin(cpu_offload=True, transformer_cls_names_to_wrap=["Block"])
    >>> plugin.fsdp_version, plugin.auto_wrap_policy, plugin.reshard_after_forward
    (2, 'transformer_based_wrap', True)
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    """A strategy of version 1: it becomes `reshard_after_forward`, and a mesh for the HYBRID_ ones."""
    reshard_after_forward: Any = None
    """Whether gathered parameters are freed after the forward pass; or the number of processes that keep a copy between them."""
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    """A MixedPrecisionPolicy of torch, a mapping of its fields, or a dtype; without it, `mixed_precision` decides."""
    auto_wrap_policy: str | Callable[..., Any] | None = None
    cpu_offload: Any = None
    ignored_modules: Iterable[torch.nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None
    _completed: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The fields that nobody gave, with the values that they got."""
    _told: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    _hybrid: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = any(getattr(self, entry.name) != entry.default for entry in fields(self) if entry.init)
        self.complete(for_worker().sharding, tell=given)  # what the options alone say is told when they are resolved

    def complete(self, section: Sharding, *, tell: bool = True) -> None:
        """Fill the fields that nobody gave from the options, translate those of version 1, and check all of them.

        With `tell`, a warning says what became of the options of version 1, each once.
        """
        self._move_strategy()
        given = [name for name in _OPTION_OF if not self._is_open(name)]
        for name, option in _OPTION_OF.items():
            value = getattr(self, name) if name in given else getattr(section, option)
            setattr(self, name, _normalize(name, value))
        notes = [note for note in self._translate(given) if note not in self._told]
        self._check()
        self._completed = {name: getattr(self, name) for name in _OPTION_OF if name not in given}
        if notes and tell:
            self._told += notes
            warnings.warn(f"FullyShardedDataParallelPlugin: {'; '.join(notes)}.", stacklevel=4)

    def _is_open(self, name: str) -> bool:
        value = getattr(self, name)
        return value is None or (name in self._completed and self._completed[name] == value)

    def _move_strategy(self) -> None:
        """Move a strategy of version 1 that was given as `reshard_after_forward` to the field that is for it."""
        if self.reshard_after_forward is not None:
            given = _normalize("reshard_after_forward", self.reshard_after_forward)
            if given in RESHARD_OF:
                self.sharding_strategy, self.reshard_after_forward = self.sharding_strategy or given, None

    def _translate(self, given: list[str]) -> list[str]:
        """Turn what is written for version 1 into version 2; return what became what, and what has no effect."""
        notes = []
        if self.fsdp_version == 1:
            notes.append("fsdp_version=1 became 2, which is what runs here")
            self.fsdp_version = 2
        strategy = self.sharding_strategy
        if self.reshard_after_forward in RESHARD_OF:  # from the configuration
            strategy = strategy or self.reshard_after_forward
        elif strategy is not None and "reshard_after_forward" in given:
            if "sharding_strategy" in given and self.reshard_after_forward != RESHARD_OF[strategy]:
                raise _error(
                    f"sharding_strategy={strategy!r}, reshard_after_forward={self.reshard_after_forward!r}",
                    f"contradict each other: {strategy} means reshard_after_forward={RESHARD_OF[strategy]}",
                    "Leave sharding_strategy out",
                )
            strategy = strategy if "sharding_strategy" in given else None
        self._hybrid = strategy is not None and strategy.startswith("HYBRID")
        if strategy is not None:
            self.reshard_after_forward = RESHARD_OF[strategy]
            mesh = " and a mesh that shards within a machine and replicates across machines, as " if self._hybrid else ""
            mesh += "ParallelismConfig(dp_replicate_size=MACHINES, dp_shard_size=PROCESSES_OF_ONE) does" if self._hybrid else ""
            notes.append(f"sharding_strategy={strategy} became reshard_after_forward={self.reshard_after_forward}{mesh}")
        if self.auto_wrap_policy is None and self.transformer_cls_names_to_wrap:
            self.auto_wrap_policy = "transformer_based_wrap"
        for name, why in _WITHOUT_EFFECT.items():
            value = getattr(self, name)
            if value is not None and (name, value) not in _AS_VERSION_2:
                notes.append(f"{name} has no effect: {why}")
        for name, policy in (("transformer_cls_names_to_wrap", "transformer_based_wrap"), ("min_num_params", "size_based_wrap")):
            if name in given and self.auto_wrap_policy != policy:
                notes.append(f"{name} has no effect without auto_wrap_policy={policy!r}")
        return notes

    def _check(self) -> None:
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise _error(
                "activation_checkpointing_offload=True", "moves the inputs of checkpointed blocks, but activation_checkpointing is off",
                "Write activation_checkpointing=True too, or leave it out",
            )
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            raise _error(
                "cpu_ram_efficient_loading=True, sync_module_states=False",
                "cannot work together: only the main process has the weights, so they have to be sent to the others",
                "Leave sync_module_states out",
            )
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise _error(f"param_init_fn={self.param_init_fn!r}", "is not a function of a module", "Pass a function")
        self.validate_mixed_precision_policy()
        self.validate_cpu_offload()

    # -- the state dict -------------------------------------------------------------------------------------------

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Switch what checkpoints hold: "SHARDED_STATE_DICT" or "FULL_STATE_DICT"; None keeps the present one."""
        self.state_dict_type = _normalize("state_dict_type", state_dict_type or self.state_dict_type)

    # -- blocks ---------------------------------------------------------------------------------------------------

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Find the blocks of a model: raise if a class is not there; without a policy, take the classes of the blocks that are found."""
        plan = plan_blocks(
            model,
            ShardingOptions(
                auto_wrap_policy=self.auto_wrap_policy,
                transformer_cls_names_to_wrap=tuple(self.transformer_cls_names_to_wrap or ()),
                min_num_params=self.min_num_params or ShardingOptions.min_num_params,
                ignored_modules=_ignored(self.ignored_modules) if self.ignored_modules else None,
            ),
        )
        if self.auto_wrap_policy is None and plan.blocks:
            self.auto_wrap_policy = "transformer_based_wrap"
            self.transformer_cls_names_to_wrap = list(dict.fromkeys(type(module).__name__ for _, module in plan.blocks))

    # -- precision ------------------------------------------------------------------------------------------------

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Make the policy of "bf16", "fp16" or a dtype: parameters are gathered in it, gradients reduced in float32.

        A policy that is there is kept without `override`. `buffer_autocast` is of version 1: buffers keep their dtype.
        """
        if self.mixed_precision_policy is not None and not override:
            return
        self.mixed_precision_policy = None if mixed_precision in ("no", "fp8") else _policy(mixed_precision)

    def validate_mixed_precision_policy(self) -> None:
        """Make a MixedPrecisionPolicy of a mapping, a dtype or a policy of version 1; raise if it is something else."""
        if self.mixed_precision_policy is not None:
            self.mixed_precision_policy = _policy(self.mixed_precision_policy)

    # -- offload --------------------------------------------------------------------------------------------------

    def set_cpu_offload(self) -> None:
        """Make torch's policy of `cpu_offload`; memory is pinned where there is an accelerator to copy to."""
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        if not isinstance(self.cpu_offload, OffloadPolicy):
            self.cpu_offload = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if _offloads(self) else OffloadPolicy()

    def validate_cpu_offload(self) -> None:
        """Raise if `cpu_offload` is neither true nor false, nor a policy of torch."""
        _offloads(self)


def _error(given: str, why: str, instead: str) -> ConfigError:
    return ConfigError(f"FullyShardedDataParallelPlugin({given}) {why}.\n{instead}.")


# -- fields -----------------------------------------------------------------------------------------------------------


def _normalize(name: str, value: Any) -> Any:
    """Return the value of a field in its usual form, checked as the option of that name is."""
    if value is None:
        return None
    reader = _READERS.get(name)
    return reader(value) if reader else _parsed(name, value)


def _parsed(name: str, value: Any) -> Value:
    option = replace(OPTIONS[_OPTION_OF[name]], name=name)
    return parse(option, value, Origin("constructor", f"FullyShardedDataParallelPlugin({name}=...)"))


def _strategy(value: Any) -> Value:
    return _parsed("sharding_strategy", getattr(value, "name", value))


def _reshard(value: Any) -> bool | int | str:
    text = str(_parsed("reshard_after_forward", getattr(value, "name", value)))
    return text == "true" if text in ("true", "false") else int(text) if text.isdigit() else text


def _prefetch(value: Any) -> Value:
    return _parsed("backward_prefetch", getattr(value, "name", value))


def _wrap_policy(value: Any) -> str | Callable[..., Any]:
    if callable(value):
        return value  # type: ignore[no-any-return]
    if not isinstance(value, str):
        words = "'transformer_based_wrap', 'size_based_wrap', 'no_wrap' or a function that says of a module whether it is a block"
        raise _error(f"auto_wrap_policy={value!r}", "is neither a word nor a function", f"Write {words}")
    return str(_parsed("auto_wrap_policy", value)).lower()


def _class_names(value: Any) -> list[str]:
    names = value.split(",") if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    texts = [name.__name__ if isinstance(name, type) else name for name in names]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise _error(
            f"transformer_cls_names_to_wrap={value!r}", "is not a list of names of classes", 'Write for example ["LlamaDecoderLayer"]'
        )
    return [text.strip() for text in texts]


def _cpu_offload(value: Any) -> Any:
    return value if hasattr(value, "offload_params") or type(value).__name__.endswith("OffloadPolicy") else _parsed("cpu_offload", value)


def _ignored(value: Any) -> tuple[torch.nn.Module, ...] | str:
    if isinstance(value, str):
        return str(_parsed("ignored_modules", value))
    modules = tuple(value) if isinstance(value, Iterable) else ()
    if not modules or not all(isinstance(module, torch.nn.Module) for module in modules):
        raise _error(
            f"ignored_modules={value!r}", "is neither a list of modules nor a regular expression",
            r'Write [model.router], or a pattern over whole names such as r".*\.router"',
        )
    return modules


def _state_dict_type(value: Any) -> Any:
    from torch.distributed.fsdp import StateDictType

    return StateDictType[str(_parsed("state_dict_type", getattr(value, "name", value)))]


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "sharding_strategy": _strategy,
    "reshard_after_forward": _reshard,
    "backward_prefetch": _prefetch,
    "auto_wrap_policy": _wrap_policy,
    "transformer_cls_names_to_wrap": _class_names,
    "cpu_offload": _cpu_offload,
    "ignored_modules": _ignored,
    "state_dict_type": _state_dict_type,
}


def _offloads(plugin: FullyShardedDataParallelPlugin) -> bool:
    value = plugin.cpu_offload
    if isinstance(value, bool) or value is None:
        return bool(value)
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    if isinstance(value, CPUOffload):
        return value.offload_params
    if isinstance(value, OffloadPolicy):
        return isinstance(value, CPUOffloadPolicy)
    raise _error(f"cpu_offload={value!r}", "is neither true nor false, nor a policy of torch", "Write True or False")


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    found = _DTYPES.get(str(value).strip().lower().removeprefix("torch."))
    if found is None:
        raise _error(f"mixed_precision_policy with {name}={value!r}", "is no dtype", f"Write one of {', '.join(_DTYPES)}")
    return found


def _policy(value: Any) -> Any:
    """Return torch's MixedPrecisionPolicy for a policy, a mapping of its fields, a policy of version 1, or a dtype."""
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    if isinstance(value, MixedPrecisionPolicy):
        return value
    if isinstance(value, MixedPrecision):
        return MixedPrecisionPolicy(param_dtype=value.param_dtype, reduce_dtype=value.reduce_dtype)
    if isinstance(value, Mapping):
        known = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
        strange = [str(key) for key in value if key not in (*known, "buffer_dtype")]
        if strange:
            unknown = f"has the keys {', '.join(strange)}, which a policy does not have"
            raise _error(f"mixed_precision_policy={dict(value)!r}", unknown, f"Its keys are {', '.join(known)}")
        types = {name: _dtype(name, value.get(name)) for name in known[:3]}
        return MixedPrecisionPolicy(**types, cast_forward_inputs=bool(value.get("cast_forward_inputs", True)))
    if isinstance(value, (str, torch.dtype)):
        return MixedPrecisionPolicy(param_dtype=_dtype("param_dtype", value), reduce_dtype=torch.float32)
    raise _error(
        f"mixed_precision_policy={value!r}", "is no policy",
        'Write a MixedPrecisionPolicy of torch, {"param_dtype": ..., "reduce_dtype": ...}, or "bf16"',
    )


# -- what the strategy reads ------------------------------------------------------------------------------------------


def resolve_sharding(plugin: FullyShardedDataParallelPlugin | None, config: Sharding, mixed_precision: str) -> ShardingOptions | None:
    """Return the options of sharding, each decided; None if neither a plugin nor `use_fsdp` asks for it.

    The fields of `plugin` are stronger than `config`. With `mixed_precision` bf16 or fp16 and no policy, parameters are gathered in that
    format and gradients reduced in float32.

    >>> resolve_sharding(None, Sharding(use_fsdp=True), "bf16").param_dtype
    torch.bfloat16
    >>> resolve_sharding(None, Sharding(), "bf16") is None
    True
    """
    if plugin is None and not config.use_fsdp:
        _tell_unused(config)
        return None
    if plugin is not None and not isinstance(plugin, FullyShardedDataParallelPlugin):
        raise ConfigError(f"fsdp_plugin={plugin!r} is not a plugin.\nWrite fsdp_plugin=FullyShardedDataParallelPlugin(...).")
    plugin = plugin or FullyShardedDataParallelPlugin()
    plugin.complete(config)
    policy = plugin.mixed_precision_policy
    mixed = _MIXED.get(mixed_precision)
    defaults = ShardingOptions()
    ignored = plugin.ignored_modules
    return ShardingOptions(
        auto_wrap_policy=plugin.auto_wrap_policy,
        transformer_cls_names_to_wrap=tuple(plugin.transformer_cls_names_to_wrap or ()),
        min_num_params=plugin.min_num_params or defaults.min_num_params,
        reshard_after_forward=plugin.reshard_after_forward,
        param_dtype=mixed if policy is None else policy.param_dtype,
        reduce_dtype=(torch.float32 if mixed else None) if policy is None else policy.reduce_dtype,
        output_dtype=None if policy is None else policy.output_dtype,
        cast_forward_inputs=True if policy is None else policy.cast_forward_inputs,
        cpu_offload=_offloads(plugin),
        ignored_modules=ignored if ignored is None or isinstance(ignored, str) else tuple(ignored),
        state_dict_type=plugin.state_dict_type.name,
        activation_checkpointing=bool(plugin.activation_checkpointing),
        activation_checkpointing_offload=bool(plugin.activation_checkpointing_offload),
        cpu_ram_efficient_loading=bool(plugin.cpu_ram_efficient_loading),
        sync_module_states=bool(plugin.sync_module_states),
        param_init_fn=plugin.param_init_fn,
        hybrid=plugin._hybrid,
    )


def _tell_unused(config: Sharding) -> None:
    usual = Sharding()
    given = [entry.name for entry in fields(config) if getattr(config, entry.name) != getattr(usual, entry.name)]
    if given:
        warnings.warn(f"{', '.join(given)} without use_fsdp: no effect. Add --use_fsdp, or pass an fsdp_plugin.", stacklevel=3)
