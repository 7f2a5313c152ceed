"""Judgements of a meeting of machines: everyone there, the same versions, clocks that agree.

Pure functions from what came of a meeting to findings; see `meeting.py` for the meeting itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from slipstream.cli.health.checks import Finding
from slipstream.cli.health.meeting import Meeting

__all__ = ["judge_meeting", "no_meeting"]

_NOTICEABLE: Final = 1.0
"""Seconds: logs of several machines no longer sort."""
_DANGEROUS: Final = 10.0
"""Seconds: torch's dynamic rendezvous compares heartbeats by wall clock and gives a machine up after 15 s without one."""


def no_meeting() -> Iterator[Finding]:
    """The findings on one machine."""
    yield Finding("machines", "ok", "not applicable: one machine")
    yield Finding("clocks", "ok", "not applicable: one machine")


def judge_meeting(meeting: Meeting) -> Iterator[Finding]:
    """Who came, with which versions and clocks."""
    yield from _presence(meeting)
    if len(meeting.machines) > 1:
        yield _versions(meeting)
        yield _clocks(meeting)


def _presence(meeting: Meeting) -> Iterator[Finding]:
    hosts = ", ".join(f"{machine.machine_rank} ({machine.host})" for machine in meeting.machines)
    for problem in meeting.problems:
        tried = f"; tried: {'; '.join(meeting.tried)}" if meeting.tried else ""
        there = f"; present: {hosts}" if hosts else ""
        yield Finding("machines", "error", f"{problem}{tried}{there}", _remedy(meeting))
    if not meeting.problems:
        slowest = max(machine.round_trip for machine in meeting.machines)
        yield Finding("machines", "ok", f"all {len(meeting.machines)} met: {hosts}; slowest round trip {slowest * 1000:.1f} ms")


def _remedy(meeting: Meeting) -> str:
    if meeting.tried:
        return (
            "run this command on machine 0 at the same time, with the same --main_process_ip, --main_process_port and "
            "--num_machines; then look at the firewall between the machines"
        )
    return "run this command on every machine at the same time, each with its own --machine_rank"


def _versions(meeting: Meeting) -> Finding:
    names = dict.fromkeys(name for machine in meeting.machines for name in machine.versions)
    for name in names:
        found = {machine.machine_rank: machine.versions.get(name, "missing") for machine in meeting.machines}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"machine {rank}: {version}" for rank, version in found.items())
            return Finding("same versions", "error", f"{name} differs ({shown})", f"install the same version of {name} on every machine")
    return Finding("same versions", "ok", ", ".join(f"{name} {version}" for name, version in meeting.machines[0].versions.items()))


def _clocks(meeting: Meeting) -> Finding:
    """The largest difference between any two machines."""
    first, *_, last = sorted(meeting.machines, key=lambda machine: machine.skew)
    apart = last.skew - first.skew
    error = (first.round_trip + last.round_trip) / 2
    text = f"{apart:.3f} s apart at most (measured to {max(error, 0.0005):.3f} s)"
    if apart - error < _NOTICEABLE:
        return Finding("clocks", "ok", text)
    who = f"machine {last.machine_rank} ({last.host}) is ahead of machine {first.machine_rank} ({first.host})"
    remedy = "start a time service on every machine: systemctl enable --now chronyd (or systemd-timesyncd)"
    if apart - error < _DANGEROUS:
        return Finding("clocks", "warning", f"{text}: {who}; logs of the machines will not sort", remedy)
    return Finding("clocks", "error", f"{text}: {who}; an elastic rendezvous would take live machines for dead", remedy)
