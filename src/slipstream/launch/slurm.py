"""Machines and ranks from Slurm, when `srun` starts one launcher on each node of a job step.

`fill_from_slurm` completes a configuration that does not set the number of machines: number of nodes, rank of this node, name of the
first node, and a port that every node derives from the job id. Options set by the user are never overridden. It reads only the mapping
that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from slipstream.config import Config

__all__ = ["fill_from_slurm", "first_host"]


def fill_from_slurm(config: Config, environ: Mapping[str, str]) -> Config:
    """Return the configuration with the options that Slurm provides and the user did not set; unchanged outside such a job step.

    >>> from slipstream.config import resolve
    >>> step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    ...     "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[3-4]"}
    >>> launch = fill_from_slurm(resolve(environ={}), step).launch
    >>> launch.num_machines, launch.machine_rank, launch.main_process_ip
    (2, 1, 'n3')
    """
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    one_launcher_each = nodes == environ.get("SLURM_STEP_NUM_TASKS") and nodes not in ("", "1")
    if not (environ.get("SLURM_STEP_ID", "").isdigit() and one_launcher_each):
        return config
    known = {
        "num_machines": nodes,
        "machine_rank": environ.get("SLURM_NODEID"),
        "main_process_ip": first_host(environ.get("SLURM_STEP_NODELIST", "") or environ.get("SLURM_JOB_NODELIST", "")),
        "main_process_port": _job_port(environ.get("SLURM_JOB_ID", "0"), environ["SLURM_STEP_ID"]),
    }
    if config.origin("num_machines").kind != "default":
        return config
    not_given = {name: value for name, value in known.items() if config.origin(name).kind == "default"}
    return config.replace(caller="Slurm", **not_given)


def first_host(nodes: str) -> str | None:
    """Return the first name in Slurm's notation for lists of nodes.

    >>> first_host("gpu[07-09,12],login1"), first_host("a1,b2"), first_host("rack[2]-n[1-4]"), first_host("")
    ('gpu07', 'a1', 'rack2-n1', None)
    """
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group()) if first else None


def _job_port(job: str, step: str) -> int:
    """Return a port from 20000 to 29999: below the ephemeral ports, and different for neighbouring jobs and steps."""
    number = int(job) if job.isdigit() else 0
    return 20000 + (number * 7 + int(step)) % 10000
