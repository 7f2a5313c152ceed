"""Reading the variables by which cluster systems describe a process: numbers, host lists, and the errors about them.

What this promises: a value that cannot be used is a `ConfigError` that names the variable, what it holds and what to do.
What it never does: read `os.environ` (the mapping is always passed in), or guess.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from itertools import product
from typing import NoReturn

from slipstream.errors import ConfigError

__all__ = [
    "MEANING",
    "Environ",
    "check_order",
    "derived_port",
    "expand_hosts",
    "given",
    "half_set",
    "needed",
    "number",
    "task_counts",
    "text",
]

Environ = Mapping[str, str]

MEANING = {
    "RANK": "the number of this process, counted from 0 over all machines",
    "WORLD_SIZE": "how many processes there are in all",
    "LOCAL_RANK": "the number of this process on its machine, from 0",
    "LOCAL_WORLD_SIZE": "how many processes there are on this machine",
    "MASTER_ADDR": "name or address of the machine where rank 0 runs",
    "MASTER_PORT": "a free port on that machine, the same number for every process",
}


def text(environ: Environ, *names: str) -> str | None:
    """The first of these variables that holds something; a blank one counts as not set.

    >>> text({"A": " ", "B": "x"}, "A", "B")
    'x'
    """
    return next((value for name in names if (value := environ.get(name, "").strip())), None)


def given(environ: Environ, *names: str) -> str:
    """`NAME=value` for those of the names that hold something."""
    return ", ".join(f"{name}={value}" for name in names if (value := text(environ, name)) is not None) or "none"


def number(environ: Environ, *names: str, least: int = 0, most: int = 10**9) -> int | None:
    """The first of these variables that is set, as a whole number from `least` to `most`."""
    for name in names:
        value = text(environ, name)
        if value is None:
            continue
        if not (value.isascii() and value.isdigit() and len(value) <= 18 and least <= int(value) <= most):
            span = f"of at least {least}" if most == 10**9 else f"from {least} to {most}"
            raise ConfigError(f"{name}={value!r} in the environment is not a whole number {span}. Correct it, or unset {name}.")
        return int(value)
    return None


def needed(environ: Environ, system: str, *groups: tuple[str, ...]) -> list[int]:
    """One number per group of alternative names; the groups that have none are reported together."""
    numbers = [number(environ, *names) for names in groups]
    missing = [names[0] for names, value in zip(groups, numbers, strict=True) if value is None]
    if missing:
        half_set(environ, system, tuple(name for names in groups for name in names), missing)
    return [value for value in numbers if value is not None]


def half_set(environ: Environ, system: str, looked_at: tuple[str, ...], missing: list[str], why: str = "") -> NoReturn:
    """The error for rank variables of which some are missing: what is set, what is not, what to set or unset."""
    found = tuple(name for name in looked_at if text(environ, name) is not None)
    wanted = ", ".join(name + (f" ({MEANING[name]})" if name in MEANING else "") for name in missing)
    raise ConfigError(
        f"The variables that tell this process its rank ({system}) are half set{why}.\n"
        f"  set:     {given(environ, *found)}\n"
        f"  missing: {wanted}\n"
        f"Set what is missing, or unset {', '.join(found)} to run as a single process. `slipstream launch` sets all of them by itself."
    )


def check_order(system: str, low_name: str, low: int, high_name: str, high: int) -> None:
    """A rank must be smaller than the number of ranks."""
    if low >= high:
        span = f"it has to be one of 0 to {high - 1}" if high else "there has to be at least one"
        raise ConfigError(
            f"{low_name}={low} does not fit {high_name}={high} ({system}): {span}. "
            f"Correct one of them, or unset both to run as a single process."
        )


def derived_port(job: str) -> int:
    """A port that every rank of the job computes alike, below the range from which systems take ports of outgoing connections.

    >>> derived_port("1234.0") == derived_port("1234.0"), 12000 <= derived_port("1234.0") < 28000
    (True, True)
    """
    return 12000 + zlib.crc32(job.encode()) % 16000


def expand_hosts(hosts: str) -> tuple[str, ...]:
    """The host names that a Slurm host list stands for, in order.

    >>> expand_hosts("node[001-003,007],gpu1")
    ('node001', 'node002', 'node003', 'node007', 'gpu1')
    >>> expand_hosts("r[1-2]n[09-10]-ib")
    ('r1n09-ib', 'r1n10-ib', 'r2n09-ib', 'r2n10-ib')
    """
    names: list[str] = []
    # A comma separates hosts only outside brackets: it is followed by no "]" before the next "[".
    for part in re.split(r",(?![^\[\]]*\])", hosts.strip()):
        pieces = re.split(r"\[([^\[\]]*)\]", part.strip())
        plain, ranges = pieces[::2], pieces[1::2]
        if not part.strip() or any(mark in piece for piece in plain for mark in "[] \t"):
            raise ConfigError(f"{hosts!r} is not a list of hosts such as 'node[001-003,007],gpu1' (at {part!r}). Set MASTER_ADDR instead.")
        expanded = [_expand_range(text, hosts) for text in ranges]
        names += ["".join(_interleave(plain, values)) for values in product(*expanded)]
    return tuple(names)


def _interleave(plain: list[str], values: tuple[str, ...]) -> list[str]:
    return [piece for pair in zip(plain, (*values, ""), strict=True) for piece in pair]


def _expand_range(ranges: str, hosts: str) -> list[str]:
    numbers: list[str] = []
    for one in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", one.strip(), re.ASCII)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{one!r} in the list of hosts {hosts!r} is not a number or an ascending range. Set MASTER_ADDR instead.")
        numbers += [str(value).zfill(len(match[1])) for value in range(int(match[1]), int(match[2] or match[1]) + 1)]
    return numbers


def task_counts(environ: Environ, name: str) -> list[int]:
    """Tasks per node from a list such as `4(x2),3`: two nodes with four tasks, then one with three.

    >>> task_counts({"SLURM_TASKS_PER_NODE": "4(x2),3"}, "SLURM_TASKS_PER_NODE")
    [4, 4, 3]
    """
    counts: list[int] = []
    for part in filter(None, (text(environ, name) or "").split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip(), re.ASCII)
        if match is None:
            raise ConfigError(
                f"{name}={environ[name]!r} is not a list of task counts such as '4(x2),3'. Unset {name} if Slurm did not set it."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
