"""The resolved configuration: typed sections with the origin of every value, the checks between options, and the form sent to workers.

A `Config` is made by `resolve`, `for_worker` or `load` and never changes; `replace` returns another one. Making one checks the options
against each other, so a `Config` has no contradiction that can be known without the machine. `dump` and `load` carry it from
the launcher to the workers as JSON in one variable: only values that were set travel, with their origins, and a newer format version is
an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, get_args

from slipstream.config.names import unknown_name
from slipstream.config.option import Kind, Origin, Value, option_text, parse
from slipstream.config.schema import (
    OPTIONS,
    RESHARD_OF,
    SECTIONS,
    Command,
    Compute,
    Device,
    Launch,
    Parallelism,
    Safety,
    Sharding,
    split_pairs,
)
from slipstream.errors import ConfigError

__all__ = [
    "Choice", "Config", "UnusedKey", "VARIABLE", "VERSION", "build_config", "describe_option", "device_ids", "dump", "load",
    "parse_choices",
]


class Choice(NamedTuple):
    """A value and where it came from."""

    value: Value
    origin: Origin


def describe_option(choices: Mapping[str, Choice], name: str) -> str:
    """Return the option as it was given: "num_processes=3 (from --num_processes)"."""
    value, origin = choices[name]
    return f"{name}={option_text(value)} ({origin})"


def device_ids(gpu_ids: str | None) -> list[str] | None:
    """Return the accelerators that `gpu_ids` allows, or None if it allows all.

    >>> device_ids("0,1"), device_ids("all"), device_ids(None)
    (['0', '1'], None, None)
    """
    if gpu_ids is None or gpu_ids.strip().lower() == "all":
        return None
    return [entry.strip() for entry in gpu_ids.split(",")]


class UnusedKey(NamedTuple):
    """A key of a file of another tool that has no effect here, and why.

    >>> print(UnusedKey("tpu_env", "asks for nothing"))
    tpu_env: asks for nothing
    """

    key: str
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of a run, in sections, with the origin of each value.

    >>> from slipstream.config import resolve
    >>> config = resolve(flags={"num_processes": "2"}, environ={"SLIPSTREAM_TIMEOUT": "60"})
    >>> config.launch.num_processes, config.safety.timeout, config.compute.mixed_precision
    (2, 60.0, 'no')
    >>> print(config.origin("timeout"))
    from SLIPSTREAM_TIMEOUT
    """

    launch: Launch
    device: Device
    compute: Compute
    sharding: Sharding
    parallelism: Parallelism
    safety: Safety
    command: Command
    origins: Mapping[str, Origin] = field(repr=False)
    unused: tuple[UnusedKey, ...] = ()
    """Keys of a foreign configuration file that have no effect here, with the reason."""

    def value(self, name: str) -> Value:
        """Return the value of an option by name."""
        return self._choice(name).value

    def origin(self, name: str) -> Origin:
        """Return where the value of an option came from."""
        return self._choice(name).origin

    def _choice(self, name: str) -> Choice:
        if name not in OPTIONS:
            raise ConfigError(f"There is no option {name!r}.")
        return Choice(getattr(getattr(self, OPTIONS[name].section), name), self.origins[name])

    def describe(self, name: str) -> str:
        """Return an option with its value and origin, for messages: "num_processes=2 (from --num_processes)"."""
        return describe_option({name: self._choice(name)}, name)

    def describe_device(self) -> str:
        """Return the option that names the device family, `cpu` or `device`, as `describe` does."""
        return self.describe("cpu" if self.device.cpu else "device")

    def choices(self) -> dict[str, Choice]:
        """Return every option by name with its value and origin."""
        return {name: self._choice(name) for name in OPTIONS}

    def given(self) -> dict[str, Choice]:
        """Return the options that were set, without those that kept their default."""
        return {name: choice for name, choice in self.choices().items() if choice.origin.kind != "default"}

    def replace(self, *, caller: str = "Accelerator", **values: object) -> Config:
        """Return another configuration in which the arguments of `caller(name=value, ...)` win; None changes nothing.

        >>> from slipstream.config import resolve
        >>> config = resolve(environ={}).replace(mixed_precision="bf16")
        >>> config.compute.mixed_precision, str(config.origin("mixed_precision"))
        ('bf16', 'from Accelerator(mixed_precision=...)')
        """
        return build_config({**self.choices(), **parse_choices(values, "constructor", f"{caller}({{}}=...)")}, self.unused)

    def require_main_process(self) -> None:
        """Raise if several machines take part and no option says where they meet; for a launcher without a cluster."""
        launch = self.launch
        has_endpoint = launch.rdzv_backend != "static" and "endpoint" in split_pairs(launch.rdzv_conf)
        if launch.num_machines > 1 and launch.main_process_ip is None and not has_endpoint:
            raise ConfigError(
                f"{self.describe('num_machines')}, but main_process_ip is not given, and no cluster says which machine is the first.\n"
                "Write --main_process_ip with the host name or address of machine 0, the same on every machine."
            )


def parse_choices(values: Mapping[str, object], kind: Kind, where: str) -> dict[str, Choice]:
    """Return values by option name as choices; None means not given. `where` is the origin, with {} for the name."""
    found: dict[str, Choice] = {}
    for name, raw in values.items():
        if raw is None:
            continue
        origin = Origin(kind, where.format(name))
        if name not in OPTIONS:
            raise unknown_name(name, origin)
        found[name] = Choice(parse(OPTIONS[name], raw, origin), origin)
    return found


def build_config(choices: Mapping[str, Choice], unused: tuple[UnusedKey, ...] = ()) -> Config:
    """Return a configuration from choices; the other options get their default."""
    choices = _settle_device(_settle_strategy(choices))
    complete = {name: choices.get(name) or Choice(option.default, Origin("default")) for name, option in OPTIONS.items()}
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, option in OPTIONS.items():
        values[option.section][name] = complete[name].value
    sections: dict[str, Any] = {section: declared(**values[section]) for section, declared in SECTIONS.items()}
    origins = {name: choice.origin for name, choice in complete.items()}
    config = Config(**sections, origins=origins, unused=unused)
    _check_processes(config)
    _check_devices(config)
    _check_sharding(config)
    return config


def _settle_strategy(choices: Mapping[str, Choice]) -> Mapping[str, Choice]:
    """Return the choices with one of `fsdp_sharding_strategy` and `fsdp_reshard_after_forward`, which mean the same: the stronger one."""
    names = ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")
    old, new = (choices.get(name) for name in names)
    if old is None or new is None or "default" in (old.origin.kind, new.origin.kind) or old.value is None:
        return choices
    if old.origin.kind == new.origin.kind:
        meant = option_text(RESHARD_OF[str(old.value)])
        if new.value in (meant, old.value):
            return choices
        raise ConfigError(
            f"{describe_option(choices, names[0])} contradicts {describe_option(choices, names[1])}: {old.value} means "
            f"fsdp_reshard_after_forward {meant}.\nLeave fsdp_sharding_strategy out."
        )
    return _without_weaker(choices, *names)


def _settle_device(choices: Mapping[str, Choice]) -> Mapping[str, Choice]:
    """Return the choices without the weaker one of `cpu` and `device` where they contradict each other."""
    cpu, device = choices.get("cpu"), choices.get("device")
    if cpu is None or device is None or "default" in (cpu.origin.kind, device.origin.kind) or cpu.value is (device.value == "cpu"):
        return choices
    if cpu.origin.kind == device.origin.kind:
        raise ConfigError(
            f"{describe_option(choices, 'cpu')} contradicts {describe_option(choices, 'device')}.\nLeave one of them out."
        )
    return _without_weaker(choices, "cpu", "device")


def _without_weaker(choices: Mapping[str, Choice], first: str, second: str) -> Mapping[str, Choice]:
    kinds = get_args(Kind)  # from the strongest
    weaker = first if kinds.index(choices[first].origin.kind) > kinds.index(choices[second].origin.kind) else second
    return {name: choice for name, choice in choices.items() if name != weaker}


def _check_processes(config: Config) -> None:
    """Raise if the numbers of processes and machines, the machine rank, the port or the target contradict each other."""
    launch, machines = config.launch, config.launch.num_machines
    if launch.machine_rank >= machines:
        raise ConfigError(
            f"{config.describe('machine_rank')} contradicts {config.describe('num_machines')}.\n"
            f"Ranks are counted from 0, so the highest is {machines - 1} here: write that or less, or a larger num_machines."
        )
    if launch.num_processes is not None and launch.num_processes % machines:
        suggestion = machines * max(1, round(launch.num_processes / machines))
        raise ConfigError(
            f"{config.describe('num_processes')} cannot be shared out evenly: {config.describe('num_machines')}.\n"
            f"num_processes counts all machines: write a multiple of {machines}, such as {suggestion}."
        )
    if config.command.module and config.command.no_python:
        raise ConfigError("--module contradicts --no_python: a module needs the Python interpreter.\nLeave one of them out.")
    if launch.main_process_port == 0 and machines > 1:
        raise ConfigError(
            f"{config.describe('main_process_port')} contradicts {config.describe('num_machines')}: the other machines cannot know which "
            "free port machine 0 takes.\nWrite a port number, such as --main_process_port 29500."
        )


def _check_devices(config: Config) -> None:
    """Raise if the options about accelerators contradict each other or the number of processes."""
    launch, ids = config.launch, device_ids(config.launch.gpu_ids)
    on_cpu = None if config.device.family != "cpu" else "cpu" if config.device.cpu else "device"
    if on_cpu is not None and ids is not None:
        instead = "--no_cpu or --gpu_ids all" if on_cpu == "cpu" else "another device or --gpu_ids all"
        raise ConfigError(
            f"{config.describe('gpu_ids')} contradicts {config.describe(on_cpu)}.\nLeave one of them out, or write {instead}."
        )
    local_processes = (launch.num_processes or 0) // launch.num_machines
    if ids is not None and local_processes > len(ids):
        raise ConfigError(
            f"{config.describe('num_processes')} means {local_processes} on each machine, but {config.describe('gpu_ids')} "
            f"allows {len(ids)}.\n"
            f"Each process needs an accelerator of its own: name {local_processes} of them in gpu_ids, or start fewer processes."
        )
    if config.command.multi_gpu and (on_cpu is not None or launch.num_processes == 1):
        other = config.describe(on_cpu or "num_processes")
        raise ConfigError(
            f"{config.describe('multi_gpu')} contradicts {other}.\nLeave --multi_gpu out; num_processes says how many to start."
        )


def _check_sharding(config: Config) -> None:
    """Raise if the sizes of the mesh do not multiply to the number of processes."""
    mesh, processes = config.parallelism, config.launch.num_processes
    if mesh.use_parallelism_config is False:
        return
    replicas, shards = mesh.parallelism_config_dp_replicate_size, mesh.parallelism_config_dp_shard_size
    product = (replicas or 1) * (shards or 1)
    if processes is None or product == 1 or product == processes or (shards is None and processes % product == 0):
        return
    sizes = {"parallelism_config_dp_replicate_size": replicas, "parallelism_config_dp_shard_size": shards}
    given = " and ".join(config.describe(name) for name, size in sizes.items() if size)
    reason = f"{replicas} x {shards} = {product}" if replicas and shards else f"{product} does not divide {processes}"
    if processes % product == 0:
        reason = f"that is a mesh of {product} processes"
    raise ConfigError(f"{given} cannot be laid over {config.describe('num_processes')}: {reason}.\nStart {product}, or change the sizes.")


VARIABLE: Final = "SLIPSTREAM_CONFIG"
VERSION: Final = 1


def dump(config: Config) -> str:
    """Return the text for the variable.

    >>> from slipstream.config import resolve
    >>> dump(resolve(flags={"cpu": True}, environ={}))
    '{"version":1,"options":{"cpu":[true,"flag","--cpu"]}}'
    """
    options = {
        name: [choice.value, choice.origin.kind, choice.origin.where] for name, choice in config.given().items() if OPTIONS[name].in_file
    }
    return json.dumps({"version": VERSION, "options": options}, separators=(",", ":"))


def load(text: str) -> Config:
    """Return the configuration in a text that `dump` made."""
    try:
        data: Any = json.loads(text)
        version = data["version"]
        if not isinstance(version, int) or version < 1:
            raise ValueError(version)
        if version <= VERSION:
            return build_config({name: _choice(name, *entry) for name, entry in data["options"].items()})
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(
            f"The variable {VARIABLE} does not hold what `slipstream launch` writes there.\n"
            "It is not meant to be set by hand: unset it, and use flags, a file or the other SLIPSTREAM_ variables."
        ) from None
    raise ConfigError(
        f"The variable {VARIABLE} has version {version}; this Slipstream understands versions up to {VERSION}.\n"
        "The launcher and the script use different versions: install the same one for both."
    )


def _choice(name: str, value: object, kind: Kind, where: str) -> Choice:
    if name not in OPTIONS or kind not in get_args(Kind) or not isinstance(where, str):
        raise KeyError(name)
    origin = Origin(kind, where)
    return Choice(parse(OPTIONS[name], value, origin) if value is not None else None, origin)
