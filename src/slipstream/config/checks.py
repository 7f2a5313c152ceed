"""What two options must not say together.

Each check looks at a resolved configuration and returns a sentence about the contradiction, naming both values and where
each came from, with what to write instead; or None. `contradiction` gives the first one. Single values were checked before,
by `option.parse`. Nothing here decides what a cluster or a machine would have to say: `missing_main_process` is for the
launcher to ask once it knows that no cluster names the machines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from slipstream.config.option import Origin, Value
from slipstream.config.schema import split_pairs

__all__ = ["Choice", "Choices", "contradiction", "device_ids", "missing_main_process", "said"]


class Choice(NamedTuple):
    """A value and where it came from."""

    value: Value
    origin: Origin


Choices = Mapping[str, Choice]
"""Every option by name."""


def said(choices: Choices, name: str) -> str:
    """The option as it was given: "num_processes=3 (from --num_processes)"."""
    value, origin = choices[name]
    return f"{name}={str(value).lower() if isinstance(value, bool) else value} ({origin})"


def device_ids(gpu_ids: str | None) -> list[str] | None:
    """The accelerators that `gpu_ids` allows, or None when it allows all of them.

    >>> device_ids("0,1"), device_ids("all"), device_ids(None)
    (['0', '1'], None, None)
    """
    if gpu_ids is None or gpu_ids.strip().lower() == "all":
        return None
    return [entry.strip() for entry in gpu_ids.split(",")]


def _machine_rank(choices: Choices) -> str | None:
    rank, machines = _number(choices, "machine_rank"), _number(choices, "num_machines")
    if rank < machines:
        return None
    return (
        f"{said(choices, 'machine_rank')} contradicts {said(choices, 'num_machines')}.\n"
        f"Ranks are counted from 0, so the highest is {machines - 1} here: write that or less, or a larger num_machines."
    )


def _even_share(choices: Choices) -> str | None:
    processes, machines = _number(choices, "num_processes"), _number(choices, "num_machines")
    if processes % machines == 0:
        return None
    return (
        f"{said(choices, 'num_processes')} cannot be shared out evenly: {said(choices, 'num_machines')}.\n"
        f"num_processes counts all machines: write a multiple of {machines}, such as {machines * max(1, round(processes / machines))}."
    )


def _cpu_and_devices(choices: Choices) -> str | None:
    ids = choices["gpu_ids"].value
    if not choices["cpu"].value or device_ids(str(ids) if ids is not None else None) is None:
        return None
    return f"{said(choices, 'gpu_ids')} contradicts {said(choices, 'cpu')}.\nLeave one of them out, or write --no_cpu or --gpu_ids all."


def _enough_devices(choices: Choices) -> str | None:
    ids = device_ids(str(choices["gpu_ids"].value)) if choices["gpu_ids"].value is not None else None
    if ids is None or choices["num_processes"].value is None:
        return None
    here = _number(choices, "num_processes") // _number(choices, "num_machines")
    if here <= len(ids):
        return None
    return (
        f"{said(choices, 'num_processes')} means {here} on each machine, but {said(choices, 'gpu_ids')} allows {len(ids)}.\n"
        f"Each process needs an accelerator of its own: name {here} of them in gpu_ids, or start fewer processes."
    )


def _several_accelerators(choices: Choices) -> str | None:
    if not choices["multi_gpu"].value:
        return None
    opponent = "cpu" if choices["cpu"].value else "num_processes" if choices["num_processes"].value == 1 else None
    if opponent is None:
        return None
    return (
        f"{said(choices, 'multi_gpu')} contradicts {said(choices, opponent)}.\nLeave --multi_gpu out; num_processes says how many to start."
    )


def _module_or_program(choices: Choices) -> str | None:
    if not (choices["module"].value and choices["no_python"].value):
        return None
    return "--module contradicts --no_python: a module needs the Python interpreter.\nLeave one of them out."


def _free_port_on_one_machine(choices: Choices) -> str | None:
    if choices["main_process_port"].value != 0 or _number(choices, "num_machines") == 1:
        return None
    return (
        f"{said(choices, 'main_process_port')} contradicts {said(choices, 'num_machines')}: "
        "the other machines cannot know which free port machine 0 takes.\nWrite a port number, such as --main_process_port 29500."
    )


_CHECKS: Final[tuple[Callable[[Choices], str | None], ...]] = (
    _machine_rank,
    _even_share,
    _cpu_and_devices,
    _enough_devices,
    _several_accelerators,
    _module_or_program,
    _free_port_on_one_machine,
)


def contradiction(choices: Choices) -> str | None:
    """What is wrong with the options taken together, or None."""
    return next((complaint for complaint in (check(choices) for check in _CHECKS) if complaint), None)


def missing_main_process(choices: Choices) -> str | None:
    """What is missing for several machines to meet when no cluster says so, or None."""
    if _number(choices, "num_machines") == 1 or choices["main_process_ip"].value is not None:
        return None
    if choices["rdzv_backend"].value != "static" and "endpoint" in split_pairs(str(choices["rdzv_conf"].value)):
        return None
    return (
        f"{said(choices, 'num_machines')}, but main_process_ip is not given, and no cluster says which machine is the first.\n"
        "Write --main_process_ip with the host name or address of machine 0, the same on every machine."
    )


def _number(choices: Choices, name: str) -> int:
    value = choices[name].value
    return int(value) if value is not None else 0
