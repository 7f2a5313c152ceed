"""Machines and ranks from Slurm."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from slipstream.config import resolve
from slipstream.launch.slurm import fill_from_slurm, first_host

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_slurm_one_launcher_per_node():
    """Srun with one launcher per node needs no flags."""
    launch = fill_from_slurm(resolve(environ={}), STEP).launch
    assert (launch.num_machines, launch.machine_rank, launch.main_process_ip) == (2, 1, "gpu07")
    assert launch.main_process_port == fill_from_slurm(resolve(environ={}), {**STEP, "SLURM_NODEID": "0"}).launch.main_process_port


@pytest.mark.parametrize(
    "change",
    [{"SLURM_STEP_NUM_TASKS": "8"}, {"SLURM_STEP_ID": ""}, {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}],
    ids=["a task per process", "not under srun", "one node"],
)
def test_slurm_other_jobs_unchanged(change):
    """Other Slurm jobs are left alone."""
    assert fill_from_slurm(resolve(environ={}), {**STEP, **change}).launch.num_machines == 1


def test_slurm_keeps_user_options():
    """Slurm never overrides the user."""
    config = resolve(flags={"num_machines": 1}, environ={})
    assert fill_from_slurm(config, STEP) is config
    assert fill_from_slurm(resolve(flags={"main_process_port": 5}, environ={}), STEP).launch.main_process_port == 5


@given(st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True), min_size=1, max_size=4))
def test_slurm_first_plain_host(names):
    """The first of plain names."""
    assert first_host(",".join(names)) == names[0]
