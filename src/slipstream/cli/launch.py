"""`slipstream launch [options] script.py [its options]`: run a script, a module or a program in one or more processes.

The options are those that the configuration declares, in both spellings. Everything after the script is passed to it unchanged. Errors in
the options are found before anything is started.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import click

from slipstream.config import OPTIONS, Config, Option, flag_names, negative_flag_names, resolve, unknown_flag
from slipstream.config.sources import environment
from slipstream.errors import ConfigError
from slipstream.launch.plan import LaunchPlan, MachineSpec, Target, TargetKind, VisibleAccelerators, describe_plan, make_plan
from slipstream.launch.slurm import fill_from_slurm
from slipstream.launch.worker_main import end_interpreter

__all__ = ["command"]

_TITLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "command": "This command",
        "launch": "Processes and machines",
        "device": "Devices",
        "compute": "Computation",
        "sharding": "Sharded training (FSDP); BOOL is true or false",
        "parallelism": "Mesh of processes",
        "safety": "Waiting and checking",
    }
)


class _Launch(click.Command):
    """Shows options by section in the help; the configuration explains an unknown one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise unknown_flag(error.option_name) from None
        except click.UsageError as error:
            raise ConfigError(f"{error.format_message()}\n`slipstream launch --help` lists the options.") from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section, title in _TITLES.items():
            with formatter.section(title):
                formatter.write_dl([_help_row(option) for option in OPTIONS.values() if option.section == section])


def _help_row(option: Option) -> tuple[str, str]:
    names = [name for name in (option.short, *_long_names(option), *negative_flag_names(option)[:1]) if name]
    kind = "" if option.is_switch and not option.valued else " " + {bool: "BOOL", int: "N", float: "SECONDS", str: "TEXT"}[option.type]
    choices = f" One of: {', '.join(option.choices)}." if option.choices else ""
    default = f" [default: {option.default}]" if option.default not in (None, False, "") and not option.is_switch else ""
    return " / ".join(names) + kind, f"{option.help}{choices}{default}"


def _long_names(option: Option) -> list[str]:
    return [f"--{name}" for name in (option.name, *option.flag_aliases)]


def _declared(option: Option) -> click.Option:
    """Return the option for click: raw text, because the configuration parses values and explains errors."""
    yes, no = flag_names(option), negative_flag_names(option)
    if not option.is_switch or option.valued:
        return click.Option([option.name, *yes], default=None)
    if not no:
        return click.Option([option.name, *yes], is_flag=True, default=None)
    # click pairs each "yes" with a "no" in one declaration; the rest of either side stand alone
    pairs = [f"{first}/{second}" for first, second in zip(yes, no, strict=False)]
    return click.Option([option.name, *pairs, *yes[len(no) :], *[f" /{name}" for name in no[len(yes) :]]], default=None)


def _target(config: Config, words: Sequence[str]) -> Target:
    if not words:
        raise ConfigError("There is no script to run.\nWrite: slipstream launch [options] script.py [its options]")
    kind: TargetKind = "module" if config.command.module else "executable" if config.command.no_python else "script"
    return Target(kind, words[0], tuple(words[1:]))


def _machine(config: Config, environ: Mapping[str, str]) -> MachineSpec:
    from slipstream.devices.count import launch_facts

    return MachineSpec(accelerators=VisibleAccelerators(**launch_facts(environ, config.device.family, config.describe_device())))


def _mesh_rows(config: Config, plan: LaunchPlan) -> list[tuple[str, str]]:
    """Return the mesh of sharded training as rows for the plan, none without it; sizes that do not fit are an error."""
    section, sharding = config.parallelism, config.sharding
    sizes = [] if section.use_parallelism_config is False else [value for value in vars(section).values() if type(value) is int]
    if not sharding.use_fsdp and max(sizes, default=1) == 1:
        return []
    from slipstream.parallel.mesh import describe_mesh
    from slipstream.parallel.parallelism_config import resolve_mesh

    sharded = sharding.use_fsdp or (section.parallelism_config_dp_shard_size or 1) > 1  # or the script passes a plugin
    hybrid = (sharding.fsdp_sharding_strategy or "").startswith("HYBRID")
    counts = {"world_size": plan.num_processes, "local_world_size": plan.local_processes}
    mesh = resolve_mesh(None, section, **counts, sharded=sharded, hybrid=hybrid)
    asked = f"slipstream estimate MODEL --num_processes {mesh.total} --dp_replicate_size {mesh.dp_replicate}"
    return [*describe_mesh(mesh, plan.local_processes, plan.machine_rank), ("memory", f"`{asked}` says what each process holds")]


def _run(words: Sequence[str], **flags: Any) -> None:
    environ = environment()
    config = resolve(flags={name: value for name, value in flags.items() if value is not None}, environ=environ, default_file=True)
    config = fill_from_slurm(config, environ)
    target = _target(config, words)
    plan = make_plan(config, target, environ, _machine(config, environ))
    mesh = _mesh_rows(config, plan)
    if config.command.show:
        click.echo(describe_plan(plan, config, mesh))
        return
    if not config.command.quiet:
        for unused in config.unused:
            print(f"slipstream: {unused.key} in the configuration file has no effect: {unused.why}", file=sys.stderr)
    if plan.single:
        from slipstream.distributed.cluster import detect

        detect(environ)  # rank variables that are half set would fail in the script, with a traceback
    from slipstream.launch.agent import launch

    end_interpreter(launch(plan))  # at once: taking down an interpreter with torch takes a third of a second


command: Final = _Launch(
    "launch",
    params=[
        *(_declared(option) for option in OPTIONS.values()),
        click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ITS OPTIONS]"),
    ],
    callback=_run,
    help="Run SCRIPT in one or more processes. Everything after SCRIPT belongs to it.\n\n"
    "Each option can also be written with dashes (--num-processes), in a configuration file, and as a variable "
    "(SLIPSTREAM_NUM_PROCESSES). Flags overrule variables, and variables overrule the file.",
    options_metavar="[OPTIONS]",
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 80,
    },
)
