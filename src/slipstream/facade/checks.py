"""Arguments of `Accelerator` that cannot be meant: each refused with what was given, why, and what to write instead."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from slipstream.config.handlers import GradientAccumulationPlugin, ProjectConfiguration
from slipstream.data.options import DataLoaderConfiguration
from slipstream.devices import rng
from slipstream.devices.table import RNGType
from slipstream.errors import ConfigError
from slipstream.facade.handlers import HANDLERS
from slipstream.parallel.compile import TorchDynamoPlugin

__all__ = ["check_arguments", "given_arguments", "random_kinds"]

_OPTIONS = ("backend", "barrier_timeout", "debug", "hang_warning", "init_method", "timeout")


_FLAGS = (
    "device_placement",
    "split_batches",
    "step_scheduler_with_optimizer",
    "outputs_to_fp32",
    "scheduler_steps_per_process",
    "async_save",
)
_ENGINES = ("deepspeed_plugin", "fsdp_plugin", "torch_tp_plugin", "megatron_lm_plugin", "deepspeed_plugins", "parallelism_config")
_RECORDS: tuple[tuple[str, type], ...] = (
    ("dataloader_config", DataLoaderConfiguration),
    ("project_config", ProjectConfiguration),
    ("gradient_accumulation_plugin", GradientAccumulationPlugin),
    ("dynamo_plugin", TorchDynamoPlugin),
)


def check_arguments(given: Mapping[str, Any], constructor: Any) -> None:
    """Refuses names that the constructor does not have, engines that this version does not have, and values of another kind."""
    _check_names(given["options"], constructor)
    for name in _ENGINES:
        if given[name] is not None:
            raise ConfigError(
                f"Accelerator({name}={type(given[name]).__name__}(...)): this engine is not in this version, and nothing else is put in "
                "its place. Leave it out to train on one process or with replicas (DDP)."
            )
    for name in _FLAGS:
        if given[name] is not None and not isinstance(given[name], bool):
            raise ConfigError(f"Accelerator({name}={given[name]!r}): write True or False")
    for name, kind in _RECORDS:
        if given[name] is not None and not isinstance(given[name], kind):
            raise ConfigError(f"Accelerator({name}={given[name]!r}): write {name}={kind.__name__}(...)")
    handlers = given["kwargs_handlers"]
    if handlers is not None and not isinstance(handlers, list | tuple):
        raise ConfigError(f"Accelerator(kwargs_handlers={type(handlers).__name__}(...)): write a list, [{type(handlers).__name__}(...)]")


def given_arguments(given: Mapping[str, Any], constructor: Any) -> dict[str, Any]:
    """The arguments of a call that differ from their defaults, for the record of the run."""
    parameters = inspect.signature(constructor).parameters
    changed = {name: given[name] for name, one in parameters.items() if name not in ("self", "options") and given[name] is not one.default}
    return {**changed, **given["options"]}


def _check_names(options: Mapping[str, Any], constructor: Any) -> None:
    known = [*(name for name in inspect.signature(constructor).parameters if name not in ("self", "options")), *_OPTIONS]
    for name, value in options.items():
        if name not in known:
            places = _belongs_to(name, value)
            if places:
                raise TypeError(f"Accelerator({name}={value!r}): there is no such argument; write {' or '.join(places)}")
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"Accelerator({name}=...): there is no such argument; {hint}")


def _belongs_to(name: str, value: Any) -> list[str]:
    """How to write an option that is one of a plugin or handler, for each that has it."""
    found = [f"{argument}={kind.__name__}({name}={value!r})" for argument, kind in _RECORDS if name in _fields(kind)]
    found += [f"kwargs_handlers=[{kind.__name__}({name}={value!r})]" for kind in HANDLERS if name in _fields(kind)]
    return [f"Accelerator({place})" for place in found]


def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def random_kinds(rng_types: Iterable[str | RNGType] | None) -> list[str]:
    """The random states that are made those of rank 0 when a loader begins.

    >>> random_kinds(["torch", "generator"])
    ['torch']
    """
    if isinstance(rng_types, str):
        raise ConfigError(f"Accelerator(rng_types={rng_types!r}): write a list, [{rng_types!r}]")
    kinds = [str(getattr(one, "value", one)) for one in rng_types or ()]
    known = (*rng.default_kinds(), *(kind.value for kind in RNGType))
    for kind in kinds:
        if kind not in known:
            choices = ", ".join(dict.fromkeys(known))
            raise ConfigError(f"Accelerator(rng_types={kinds}): {kind!r} is not a random state; write some of {choices}")
    # The generator of a loader is ours, and the same on every rank anyway.
    return [kind for kind in kinds if kind != RNGType.GENERATOR.value]
