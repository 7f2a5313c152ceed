"""`notebook_launcher` and `debug_launcher`: run a function in several processes from a notebook or a test.

The function is pickled by value, with the notebook variables that it uses, and sent to a fresh interpreter that forks the processes.
Devices, threads and state of the notebook therefore do not matter; values that cannot be sent are found first, and the error names the
variable. Output arrives in the cell through `sys.stdout`: that of rank 0, and that of the other ranks after a failure (`output="all"`
shows everything). A failed process raises `LaunchError` with its exception and the user's frames.

The process of the notebook is never forked, its environment changes only during the call, and no process is left behind. One machine
only; use `slipstream launch` for several.
"""

from __future__ import annotations

import dis
import functools
import linecache
import re
import string
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal, NoReturn

from slipstream.config import OPTIONS, Config, resolve
from slipstream.config.sources import environment, patch_environment
from slipstream.devices.count import count_without_torch, launch_facts
from slipstream.devices.table import CPU, FAMILIES
from slipstream.distributed.cluster import detect
from slipstream.errors import ConfigError, LaunchError, SlipstreamError, StateError
from slipstream.launch.function_launcher import launch_function
from slipstream.launch.plan import LOOPBACK, MachineSpec, VisibleAccelerators

__all__ = ["debug_launcher", "notebook_launcher"]

_SHOWN_LINES = 40
"""Lines of output of each other rank that are shown after a failure."""


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[object] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = None,
    master_addr: str = LOOPBACK,
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, object] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    output: Literal["main", "all"] = "main",
) -> None:
    """Call `function(*args)` in `num_processes` processes on this machine; one process means here, in the notebook itself.

    `mixed_precision="no"` leaves the precision to the function and to the environment. `use_port` has no effect and says so: a free
    port is taken. With `output="all"`, or a `log_line_prefix_template` (it knows ${rank}, ${local_rank} and ${role_name}), the output
    of every process is shown, each line with its rank in front.

    >>> notebook_launcher(print, ("training with", 3), num_processes=1)
    training with 3
    """
    _refuse_nested("notebook_launcher")
    _refuse_other_machines(
        master_addr=master_addr,
        node_rank=node_rank,
        num_nodes=num_nodes,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_conf=dict(rdzv_conf or {}),
        rdzv_id=rdzv_id,
    )
    if num_processes is None:
        _ask_for_number()
    if use_port is not None:
        warnings.warn(f"use_port={use_port} has no effect: the processes meet on a free port of this machine. Leave it out.", stacklevel=2)
    options: dict[str, object] = {
        "num_processes": num_processes,
        "mixed_precision": None if mixed_precision == "no" else mixed_precision,
        "max_restarts": max_restarts or None,
        "monitor_interval": monitor_interval,
    }
    if num_processes == 1 and not max_restarts:
        resolve(constructor=options, caller="notebook_launcher")  # the options are checked all the same
        chosen = {} if options["mixed_precision"] is None else {str(OPTIONS["mixed_precision"].variable): mixed_precision}
        with patch_environment(**chosen):
            function(*args)
        return
    _launch(function, tuple(args), options, "notebook_launcher", log_line_prefix_template or _template(output))


def debug_launcher(function: Callable[..., object], args: Sequence[object] = (), num_processes: int = 2) -> None:
    """Call `function(*args)` in `num_processes` processes on the CPU, to try out distributed code; every process's output is shown.

    >>> def check(expected):
    ...     from slipstream import PartialState
    ...     assert PartialState().num_processes == expected
    >>> debug_launcher(check, (2,))
    """
    _refuse_nested("debug_launcher")
    _launch(function, tuple(args), {"num_processes": num_processes, "cpu": True}, "debug_launcher", _template("all"))


def _launch(
    function: Callable[..., object], args: tuple[object, ...], options: dict[str, object], caller: str, template: str | None
) -> None:
    """Start the processes, show their output, and raise a failure in a form that a notebook can show."""
    if not callable(function):
        raise ConfigError(f"{caller} was given {function!r}, which cannot be called. Give it the function itself, without parentheses.")
    captured = list(_CaptureInspector(function, args).walk())
    _refuse_captured(captured, caller)
    with tempfile.TemporaryDirectory(prefix="slipstream-notebook-") as folder:
        config = _config(options, caller, folder, everything=template is not None)
        own_logs = config.launch.log_dir == folder
        facts = launch_facts(environment(), config.device.family, config.describe_device())
        cell = _Cell(config.launch.role, template)
        try:
            launch_function(
                function,
                args,
                config=config,
                machine=MachineSpec(accelerators=VisibleAccelerators(**facts)),
                console="main" if template is None else "all",
                output=cell.write,
            )
        except LaunchError as error:
            cell.finish()
            if template is None and own_logs:
                cell.show_others(Path(folder))
            raise LaunchError(_with_source_lines(_without_folder(str(error), folder)), exit_code=error.exit_code) from None
        except SlipstreamError:
            raise
        except Exception as error:
            _explain_unpicklable(function, args, captured, error)
            raise
        finally:
            cell.finish()


def _config(options: dict[str, object], caller: str, folder: str, *, everything: bool) -> Config:
    """Return the configuration. Rank 0 writes to the cell directly, which keeps progress bars whole; the others write to files."""
    config = resolve(constructor=options, caller=caller)
    enabled = next((family.type for family in FAMILIES if family.on_request and family.is_loaded() and family.is_available()), None)
    if config.device.family is None and enabled is not None:  # the processes compute where the notebook does
        config = config.replace(caller=caller, device=enabled)
    if config.launch.log_dir is not None or config.origin("tee").kind != "default":
        return config  # the user has chosen where output goes
    others = ",".join(f"{rank}:3" for rank in range(1, config.launch.num_processes or 1))
    return config.replace(caller=caller, log_dir=folder, tee="3" if everything else others or "0")


def _template(output: str) -> str | None:
    """Return the prefix of every line; None: only rank 0 is shown, unchanged."""
    templates = {"main": None, "all": "[rank ${rank}] "}
    if output not in templates:
        raise ConfigError(f"output={output!r} is neither 'main' (what rank 0 prints) nor 'all' (what every process prints).")
    return templates[output]


# Output of the processes ------------------------------------------------------------------------------------------------------


@dataclass
class _Cell:
    """Writes to `sys.stdout` as it is now: in a notebook, the cell that is running."""

    role: str
    template: str | None
    _rest: str = field(default="", repr=False)

    def write(self, text: str) -> None:
        """Write text of the processes; with a template, whole lines with their prefix replaced."""
        if self.template is not None:
            *lines, self._rest = (self._rest + text).split("\n")
            text = "".join(self._prefixed(line) + "\n" for line in lines)
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def finish(self) -> None:
        """Write an unfinished last line."""
        rest, self._rest = self._rest, ""
        if rest:
            sys.stdout.write(self._prefixed(rest) + "\n")
            sys.stdout.flush()

    def _prefixed(self, line: str) -> str:
        """Replace the prefix of the launcher, "[role0]:" for rank 0, by that of the template."""
        match = re.match(rf"\[{re.escape(self.role)}(\d+)\]:", line)
        if match is None:
            return line
        names = {"rank": match[1], "local_rank": match[1], "role_name": self.role}
        return string.Template(self.template or "").safe_substitute(names) + line[match.end() :]

    def show_others(self, folder: Path) -> None:
        """Write the last lines of the other ranks in the last attempt."""
        attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
        ranks = (
            sorted((path for path in attempts[-1].iterdir() if path.name.isdigit()), key=lambda path: int(path.name)) if attempts else []
        )
        for rank in ranks:
            text = _read_text(rank / "stdout.log") + _before_traceback(_read_text(rank / "stderr.log"))
            if text.strip():
                lines = text.rstrip().splitlines()[-_SHOWN_LINES:]
                sys.stdout.write(f"--- the last output of rank {rank.name} ---\n" + "\n".join(lines) + "\n")
        sys.stdout.flush()


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _before_traceback(text: str) -> str:
    """Return a log without the traceback at its end, which the report has too."""
    before, found, _ = text.rpartition("Traceback (most recent call last):\n")
    return before if found else text


def _without_folder(report: str, folder: str) -> str:
    """Return the report without lines about log files, which are removed."""
    return "\n".join(line for line in report.splitlines() if folder not in line)


def _with_source_lines(report: str) -> str:
    """Add source lines to the frames of cells, which only this process knows."""
    lines = report.splitlines()
    shown: list[str] = []
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        shown.append(line)
        match = re.fullmatch(r'  File "(.+)", line (\d+), in .+', line)
        source = linecache.getline(match[1], int(match[2])).strip() if match else ""
        if source and not following.startswith("    "):
            shown.append(f"    {source}")
    return "\n".join(shown)


# Checks ----------------------------------------------------------------------------------------------------------------------


def _refuse_nested(caller: str) -> None:
    try:
        process = detect(environment())
    except ConfigError:
        return  # leftover variables do not reach the processes: the launcher sets all of them
    if process.world_size > 1:
        raise StateError(
            f"{caller} starts processes itself, but it was called in a process that is already one of several: rank {process.rank} of "
            f"{process.world_size}, started by {process.cluster}. Call the function directly here, or start the script with plain `python`."
        )


def _ask_for_number() -> NoReturn:
    _, accelerators = count_without_torch(environment())
    found = f"{accelerators} accelerators were found here" if accelerators else "no accelerator was found here, so they would use the CPU"
    raise ConfigError(
        f"notebook_launcher was not told how many processes to start ({found}). Write num_processes={accelerators or 2}, "
        f"or num_processes=1 to run the function in the notebook itself."
    )


def _refuse_other_machines(**given: object) -> None:
    """Raise for options about several machines and their rendezvous."""
    # On one machine c10d is a store that one process serves to the others, which is what happens anyway.
    fine: dict[str, tuple[object, ...]] = {
        "master_addr": (LOOPBACK, "localhost", "::1", ""),
        "node_rank": (0,),
        "num_nodes": (1,),
        "rdzv_backend": ("static", "c10d", ""),
        "rdzv_endpoint": ("",),
        "rdzv_conf": ({},),
        "rdzv_id": ("none", ""),
    }
    wrong = [f"{name}={value!r}" for name, value in given.items() if value not in fine[name]]
    if wrong:
        raise ConfigError(
            f"notebook_launcher starts processes on this machine alone, where they meet by themselves: {', '.join(wrong)} cannot be used. "
            f"Leave it out; for several machines write the function into a script and use `slipstream launch` on each."
        )


# Variables that the function uses -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Captured:
    """A value that is sent with the function, and its name for the user."""

    name: str
    value: Any


class _CaptureInspector:
    """Finds the variables that are sent with a function, through helpers, closures, partials and containers."""

    def __init__(self, function: Any, args: tuple[object, ...]) -> None:
        self._todo: list[_Captured] = [_Captured("the function", function)]
        self._todo += [_Captured(f"args[{place}]", value) for place, value in enumerate(args)]
        self._seen: set[int] = set()

    def walk(self) -> Iterator[_Captured]:
        """Yield every value once, the outermost first."""
        while self._todo:
            entry = self._todo.pop(0)
            if id(entry.value) in self._seen:
                continue
            self._seen.add(id(entry.value))
            inside = list(self._inside(entry))
            self._todo += inside
            yield entry

    def _inside(self, captured: _Captured) -> Iterable[_Captured]:
        value = captured.value
        if isinstance(value, FunctionType):
            return self._of_function(value) if _is_sent_by_value(value) else ()
        if isinstance(value, MethodType):
            return (_Captured(f"the object of {value.__qualname__}", value.__self__), _Captured(captured.name, value.__func__))
        if isinstance(value, functools.partial):
            named = {f"argument {key} of {captured.name}": argument for key, argument in (*enumerate(value.args), *value.keywords.items())}
            return (_Captured(captured.name, value.func), *(_Captured(name, argument) for name, argument in named.items()))
        if isinstance(value, type):
            methods = [method for method in vars(value).values() if isinstance(method, FunctionType)]
            return [_Captured(captured.name, method) for method in methods] if _is_sent_by_value(value) else ()
        if type(value) in (list, tuple):
            return [_Captured(f"{captured.name}[{place}]", item) for place, item in enumerate(value[:1000])]
        if _is_sent_by_value(type(value)) and hasattr(value, "__dict__"):
            return [_Captured(f"the {key} of {captured.name}", item) for key, item in vars(value).items()]
        if type(value) is dict:
            return [_Captured(f"{captured.name}[{key!r}]", item) for key, item in list(value.items())[:1000]]
        return ()

    def _of_function(self, function: FunctionType) -> Iterator[_Captured]:
        used = f"used in {function.__qualname__}"
        for name in sorted(_global_names(function.__code__)):
            if name in function.__globals__:
                yield _Captured(f"{name} ({used})", function.__globals__[name])
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield _Captured(f"{name} ({used})", cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            yield _Captured(f"a default argument of {function.__qualname__}", value)


def _is_sent_by_value(thing: Any) -> bool:
    """Return whether the code of a thing is sent, because another process cannot import it by name."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return True
    if module.__name__ == "builtins":  # some of its types, that of modules among them, are not found under their name
        return False
    found: Any = module
    for part in thing.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is not thing


def _global_names(code: CodeType) -> set[str]:
    found = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _why_not_sendable(value: Any) -> str | None:
    """Return why a value cannot be used in another process, and what to do; None if it can."""
    kind, room = type(value).__name__, type(value).__module__.partition(".")[0]
    if kind in ("Accelerator", "PartialState", "AcceleratorState", "GradientState") and room in ("slipstream", "accelerate"):
        return f"is the {kind} of this one process, made in the notebook. Make it inside the function."
    distributed = sys.modules.get("torch.distributed")
    groups = [getattr(distributed, name, None) for name in ("ProcessGroup", "Store", "Work")]
    if isinstance(value, tuple(group for group in groups if group is not None)) or kind == "DeviceMesh":
        return f"is a {kind}, a connection of this one process. Open it inside the function."
    device = next((tensor.device for tensor in _tensors(value) if tensor.device.type not in (CPU.type, "meta")), None)
    if device is not None:
        verb = "is" if hasattr(value, "device") else "has tensors"
        return f"{verb} on {device}, in the memory of this process. Make it inside the function, or move it to the CPU before."
    return None


def _tensors(value: Any) -> Iterable[Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, torch.nn.Module):
        return chain(value.parameters(), value.buffers())
    if isinstance(value, torch.optim.Optimizer):
        return (tensor for group in value.param_groups for tensor in group["params"])
    return ()


def _refuse_captured(captured: Sequence[_Captured], caller: str) -> None:
    for entry in captured:
        reason = _why_not_sendable(entry.value)
        if reason is not None:
            raise LaunchError(f"{caller} cannot send {entry.name} to other processes: it {reason}")


def _explain_unpicklable(function: object, args: tuple[object, ...], captured: Sequence[_Captured], error: Exception) -> None:
    """Raise an error that names the variable that cannot be pickled, if there is one."""
    problem = _pickling_problem((function, args))
    if problem is None:
        return
    # The innermost: what contains it cannot be sent either.
    for entry in reversed(captured):
        problem = _pickling_problem(entry.value)
        if problem is not None:
            name = getattr(function, "__qualname__", repr(function)) if entry.name == "the function" else entry.name
            raise LaunchError(
                f"{name} cannot be sent to other processes: {problem}\n"
                f"It is of type {type(entry.value).__qualname__}. Make it inside the function instead, or pass what it is made from."
            ) from error


def _pickling_problem(value: object) -> str | None:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
