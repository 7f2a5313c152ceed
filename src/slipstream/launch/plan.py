"""The launch plan: configuration and target in, `LaunchPlan` out, before any process starts.

Every error that can be known in advance is raised here, as a `ConfigError` (exit code 2). The functions are pure except for one check
that the script exists; machine, platform and environment are arguments. `describe_plan` returns what `--show` prints. Nothing here starts
a process or imports torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from typing import Final, Literal

from slipstream.config import Config
from slipstream.config.option import option_text
from slipstream.config.resolved_config import VARIABLE, device_ids, dump
from slipstream.config.schema import split_pairs
from slipstream.errors import ConfigError

__all__ = [
    "LOOPBACK", "LaunchPlan", "MachineSpec", "RendezvousSpec", "StartMethod", "Target", "TargetKind", "VisibleAccelerators",
    "check_target", "describe_plan", "make_plan",
]

LOOPBACK: Final = "127.0.0.1"
_DEFAULT_PORT: Final = 29500
StartMethod = Literal["exec", "fork", "spawn"]
TargetKind = Literal["script", "module", "executable", "function"]


@dataclass(frozen=True)
class Target:
    """What to run: its kind, its name (a path, a module, a program or the file of a pickled function) and its arguments, unchanged."""

    kind: TargetKind
    name: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class VisibleAccelerators:
    """The accelerators of this machine, found without importing torch."""

    count: int = 0
    variable: str | None = None
    """The environment variable that limits which of them a process sees."""
    total: int | None = None
    """How many there are for certain, whatever a process may see of them; None if device files were counted, which may be wrong."""
    total_variable: str = ""
    """The variable that sets `total`."""
    plugin: str | None = None
    """The module that builds and enables such devices, if they are not simply there: `extension_file()` and `enable()`."""


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """The machine that the plan is for; by default this one."""

    accelerators: VisibleAccelerators = VisibleAccelerators()
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    platform: str = sys.platform
    interpreter: tuple[str, ...] = field(default_factory=lambda: (sys.executable, *_interpreter_flags()))


_MAX_PROCESSES_PER_CORE = 64
"""More processes per core than this are considered a mistake."""


@dataclass(frozen=True, kw_only=True)
class RendezvousSpec:
    """Where and how the processes find each other."""

    backend: str
    host: str
    port: int | None
    """None: any free port, reserved by binding it."""
    settings: Mapping[str, str]

    @property
    def is_own(self) -> bool:
        """Whether the machines meet in our own store, with given machine ranks, and not through a backend of torch."""
        return self.backend == "static"


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """Everything that the launcher on this machine does. It travels to another process as JSON."""

    target: Target
    num_machines: int
    machine_rank: int
    local_processes: int
    environment: Mapping[str, str]
    """Variables of every process on this machine, in addition to those of the launcher."""
    command: tuple[str, ...]
    """The command of one process; with fork, the command of a fresh interpreter in its place."""
    start_method: StartMethod
    reason: str
    """Why the processes start this way."""
    forced: bool
    """The user chose the start method."""
    rendezvous: RendezvousSpec
    max_restarts: int = 0
    monitor_interval: float = 0.1
    role: str = "default"
    tee: str = "0"
    log_dir: str | None = None
    quiet: bool = False
    console: Literal["all", "main"] = "all"
    """Whose output the terminal shows: all processes, or rank 0 alone."""
    log_format: str = "text"
    all_warnings: bool = False
    plugin: str | None = None
    """The module that builds and enables the devices, once, before the processes start."""

    @property
    def single(self) -> bool:
        """Whether one process replaces the launcher."""
        return self.start_method == "exec"

    @property
    def as_json(self) -> bool:
        """Whether log records and messages of the launcher are lines of JSON."""
        return self.log_format == "json"

    @property
    def num_processes(self) -> int:
        return self.local_processes * self.num_machines

    @property
    def hosts_store(self) -> bool:
        """Whether the launcher on this machine serves the store of the job."""
        return self.machine_rank == 0

    def to_json(self) -> str:
        """Return the plan as text for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LaunchPlan:
        """Return the plan that `to_json` wrote.

        >>> rendezvous = RendezvousSpec(backend="static", host=LOOPBACK, port=None, settings={})
        >>> plan = LaunchPlan(target=Target("script", "a.py", ("-v",)), num_machines=1, machine_rank=0, local_processes=2, environment={},
        ...     command=("python", "a.py"), start_method="fork", reason="", forced=False, rendezvous=rendezvous)
        >>> LaunchPlan.from_json(plan.to_json()) == plan
        True
        """
        data = json.loads(text)
        target, rendezvous, command = data.pop("target"), data.pop("rendezvous"), tuple(data.pop("command"))
        target["arguments"] = tuple(target["arguments"])
        return cls(target=Target(**target), rendezvous=RendezvousSpec(**rendezvous), command=command, **data)


def make_plan(config: Config, target: Target, environ: Mapping[str, str], machine: MachineSpec | None = None) -> LaunchPlan:
    """Return the plan for this machine.

    >>> from slipstream.config import resolve
    >>> config = resolve(flags={"cpu": True, "num_processes": 2}, environ={})
    >>> plan = make_plan(config, Target("module", "timeit"), {}, MachineSpec(cores=2, platform="linux", interpreter=("python",)))
    >>> plan.local_processes, plan.start_method, plan.rendezvous.host, plan.environment["OMP_NUM_THREADS"]
    (2, 'fork', '127.0.0.1', '1')
    """
    machine = machine or MachineSpec()
    check_target(target)
    local_processes = _local_processes(config, machine.accelerators)
    most = _MAX_PROCESSES_PER_CORE * machine.cores
    if local_processes > most:
        raise ConfigError(
            f"{config.describe('num_processes')} is {local_processes} on this machine, which has {machine.cores} cores: "
            f"more than {most} would exhaust its memory.\nGive fewer."
        )
    start_method, reason = _start_method(config, target, machine, local_processes)
    return LaunchPlan(
        target=target,
        num_machines=config.launch.num_machines,
        machine_rank=config.launch.machine_rank,
        local_processes=local_processes,
        environment=_environment(config, environ, machine, local_processes, alone=start_method == "exec"),
        command=_command(target, machine, start_method),
        start_method=start_method,
        reason=reason,
        forced=config.launch.start_method != "auto",
        rendezvous=_rendezvous_spec(config),
        max_restarts=config.launch.max_restarts,
        monitor_interval=config.launch.monitor_interval,
        role=config.launch.role,
        tee=_tee(config),
        log_dir=config.launch.log_dir,
        quiet=config.command.quiet,
        log_format=config.safety.log_format,
        all_warnings=config.safety.all_warnings,
        plugin=None if config.device.family == "cpu" else machine.accelerators.plugin,
    )


def check_target(target: Target) -> None:
    """Raise a ConfigError if the target does not exist or cannot be read."""
    if target.kind == "module":
        top = target.name.partition(".")[0]
        if top not in sys.builtin_module_names and PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
            raise ConfigError(f"There is no module {target.name} (after -m).\nIts package must be installed, or in {os.getcwd()}.")
        return
    if target.kind == "executable":
        if shutil.which(target.name) is None:
            raise ConfigError(f"The program {target.name} (after --no_python) is not on the PATH or not executable.\nGive its full path.")
        return
    if not os.path.exists(target.name):
        is_path = os.sep in target.name or target.name.endswith(".py")
        hint = "Check the path." if is_path else "To run a module by its name, write -m before it."
        raise ConfigError(f"The script {target.name} does not exist (looked in {os.getcwd()}).\n{hint}")
    if os.path.isdir(target.name):
        raise ConfigError(f"The script {target.name} is a folder.\nGive the path of a file with Python code, or a module with -m.")
    if not os.access(target.name, os.R_OK):
        raise ConfigError(f"The script {target.name} cannot be read: permission denied.\nMake it readable for this user.")


def _local_processes(config: Config, accelerators: VisibleAccelerators) -> int:
    on_cpu = config.device.family == "cpu"
    usable = 0 if on_cpu else accelerators.count
    if config.launch.gpu_ids is not None and not on_cpu:
        if not accelerators.count:
            raise ConfigError(f"{config.describe('gpu_ids')}, but no accelerator was found on this machine.\nLeave it out.")
        usable = min(usable, len(device_ids(config.launch.gpu_ids) or range(usable)))
    if config.command.multi_gpu and usable < 2:
        found = "is 1 accelerator" if usable == 1 else f"are {usable} accelerators"
        raise ConfigError(f"{config.describe('multi_gpu')}, but there {found} to use on this machine.\nLeave --multi_gpu out.")
    wanted = config.launch.num_processes
    local = max(1, usable) if wanted is None else wanted // config.launch.num_machines
    if accelerators.total is not None and not on_cpu:
        _check_total(config, accelerators, accelerators.total, usable, local)
    return local


def _check_total(config: Config, accelerators: VisibleAccelerators, total: int, usable: int, local: int) -> None:
    """Raise if processes or device numbers go beyond devices whose number is certain."""
    device = config.describe_device()
    beyond = [entry for entry in device_ids(config.launch.gpu_ids) or () if not entry.isdecimal() or int(entry) >= total]
    if beyond:
        raise ConfigError(
            f"{config.describe('gpu_ids')} names {', '.join(beyond)}, but {device} has {total} devices, 0 to {total - 1}.\n"
            f"Name some of those, or set {accelerators.total_variable} for more."
        )
    if local > usable:
        limited = f" of {total}, which {accelerators.variable} allows" if usable < total else ""
        instead = f"--num_processes {usable * config.launch.num_machines}, or " if usable else ""
        more = f"unset {accelerators.variable}" if local <= total else f"set {accelerators.total_variable}={local} for more devices"
        raise ConfigError(
            f"{config.describe('num_processes')} means {local} on this machine, but {device} has {usable} devices{limited}: "
            f"{local} - {usable} = {local - usable} without one.\n"
            f"Each process needs a device of its own: write {instead}{more}."
        )


def _start_method(config: Config, target: Target, machine: MachineSpec, local_processes: int) -> tuple[StartMethod, str]:
    wanted = config.launch.start_method
    needs_launcher = [name for name in ("max_restarts", "log_dir", "tee") if config.value(name) not in (0, None, "0")]
    needs_launcher += ["log_format"] if config.safety.log_format == "json" else []
    alone = local_processes * config.launch.num_machines == 1 and not needs_launcher and config.launch.rdzv_backend == "static"
    if alone and target.kind != "function":  # a function is always started beside the process that calls it
        return "exec", "one process takes the launcher's place"
    if target.kind == "executable":
        return "spawn", "an executable cannot be forked"
    if wanted != "auto":
        return ("fork" if wanted == "fork" else "spawn"), config.describe("start_method")
    if machine.platform != "linux":
        return "spawn", f"fork is not safe on {machine.platform}"
    if config.launch.rdzv_backend != "static":
        return "spawn", f"{config.describe('rdzv_backend')} keeps a thread, with which fork is not safe"
    return "fork", "safe here, and torch is imported once for all processes"


def _environment(config: Config, environ: Mapping[str, str], machine: MachineSpec, local_processes: int, alone: bool) -> dict[str, str]:
    found = {VARIABLE: dump(config)}
    threads = config.launch.num_cpu_threads_per_process
    if threads is None and local_processes > 1 and "OMP_NUM_THREADS" not in environ:
        threads = max(1, machine.cores // local_processes)
    if threads is not None:
        found["OMP_NUM_THREADS"] = str(threads)
    ids = device_ids(config.launch.gpu_ids)
    if ids is not None and machine.accelerators.variable and config.device.family != "cpu":
        found[machine.accelerators.variable] = ",".join(ids)
    if config.sharding.use_fsdp and config.sharding.fsdp_cpu_ram_efficient_loading:
        # transformers reads these two: it then loads weights on the main process only
        found |= {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    if config.launch.num_machines == 1 and not alone:
        found["GLOO_SOCKET_IFNAME"] = "lo" if machine.platform == "linux" else "lo0"
    return found


def _command(target: Target, machine: MachineSpec, start_method: StartMethod) -> tuple[str, ...]:
    if target.kind == "executable":
        return (target.name, *target.arguments)
    if start_method != "exec":
        return (*machine.interpreter, "-m", "slipstream.launch.worker_main", target.kind, target.name, *target.arguments)
    if target.kind == "module":
        return (*machine.interpreter, "-m", target.name, *target.arguments)
    # a name that starts with a dash would be an option to the interpreter
    name = os.path.join(os.curdir, target.name) if target.name.startswith("-") else target.name
    return (*machine.interpreter, name, *target.arguments)


def _rendezvous_spec(config: Config) -> RendezvousSpec:
    launch = config.launch
    settings = split_pairs(launch.rdzv_conf)
    own = launch.rdzv_backend == "static"
    if launch.num_machines == 1:
        return RendezvousSpec(backend=launch.rdzv_backend, host=LOOPBACK, port=launch.main_process_port or None, settings=settings)
    if own and not launch.same_network:
        raise ConfigError(
            f"{config.describe('same_network')}: the machines need an endpoint that all of them reach, but rdzv_backend is static.\n"
            "Write --rdzv_backend c10d --rdzv_conf endpoint=HOST:PORT, or leave --no_same_network out."
        )
    config.require_main_process()
    host = launch.main_process_ip or ""
    port = launch.main_process_port if launch.main_process_port is not None else _DEFAULT_PORT if own or host else None
    return RendezvousSpec(backend=launch.rdzv_backend, host=host.strip("[]"), port=port, settings=settings)


def _tee(config: Config) -> str:
    """With `log_dir` alone, everything goes to the files and to the terminal."""
    if config.launch.log_dir is not None and config.origin("tee").kind == "default":
        return "3"
    return config.launch.tee


def _interpreter_flags() -> Sequence[str]:
    """Return the flags of this interpreter (-X, -W, -O ...), so that a fresh one behaves the same."""
    # Private in CPython 3.10 to 3.13, and what multiprocessing uses; tests/launch/test_launch_plan.py notices.
    flags: Sequence[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def describe_plan(plan: LaunchPlan, config: Config, mesh: Sequence[tuple[str, str]] = ()) -> str:
    """Return the plan as text: what would start, the rows of its mesh, and where each option came from."""
    here = f"{plan.local_processes} on this machine" + (f", {plan.num_processes} in total" if plan.num_machines > 1 else "")
    rendezvous = plan.rendezvous
    port = "a free port" if rendezvous.port is None else f"port {rendezvous.port}"
    server = "this launcher" if plan.hosts_store else "the launcher of machine 0"
    where = f"{rendezvous.host}, {port}, served by {server}" if rendezvous.is_own else f"through {rendezvous.backend} at {rendezvous.host}"
    rows = [
        ("run", f"{plan.target.kind} {_quoted(plan.target.name)}"),
        ("arguments", " ".join(_quoted(argument) for argument in plan.target.arguments) or "none"),
        ("processes", here),
        ("machine", f"{plan.machine_rank} of {plan.num_machines}"),
        ("device", config.device.family or "the first family that torch can use"),
        ("started by", f"{plan.start_method}: {plan.reason}"),
        ("command", " ".join(_quoted(word) for word in plan.command)),
    ]
    if not plan.single:
        rows += [("meeting", where), ("restarts", str(plan.max_restarts)), ("tee", plan.tee), ("logs", plan.log_dir or "none")]
    lines = _table(rows)
    if mesh:
        lines += ["", "mesh of the processes", *("  " + line for line in _table(mesh))]
    lines += ["", "environment of every process, in addition to this one's"]
    lines += [f"  {name}={value}" for name, value in sorted(plan.environment.items())]
    lines += ["", "options that are set"]
    given = [(name, f"{option_text(choice.value)}  {choice.origin}") for name, choice in config.given().items()]
    lines += ["  " + line for line in _table(given)] or ["  none"]
    lines += [f"  not used: {unused}" for unused in config.unused]
    return "\n".join(lines)


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _quoted(word: str) -> str:
    """Return a word as it is, or quoted and escaped if it could be misread."""
    return word if word and word.isprintable() and not any(mark in word for mark in " '\"\\") else ascii(word)
