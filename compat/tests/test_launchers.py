"""`notebook_launcher` and `debug_launcher` with the arguments of Accelerate."""

from __future__ import annotations

import inspect

import accelerate
import pytest
from accelerate.launchers import debug_launcher, notebook_launcher

from slipstream.errors import ConfigError, LaunchError


def write_rank(folder, text="", *, precision=None):
    import os
    from pathlib import Path

    state = accelerate.PartialState()
    if precision is not None:
        assert accelerate.Accelerator().mixed_precision == precision
    variables = [os.environ.get(name, "") for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION")]
    (Path(folder) / f"{state.process_index} of {state.num_processes}").write_text(" ".join([text, *variables]))


def test_debug_launcher(tmp_path):
    """The function runs on two CPU processes, with the variables of Accelerate, and they are gone afterwards."""
    import os

    debug_launcher(write_rank, (str(tmp_path), "text"))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0 of 2": "text yes no", "1 of 2": "text yes no"}
    assert "ACCELERATE_USE_CPU" not in os.environ


def test_notebook_launcher_on_several_processes(tmp_path):
    """The precision reaches the Accelerators of all processes."""
    notebook_launcher(lambda folder: write_rank(folder, precision="bf16"), (str(tmp_path),), num_processes=2, mixed_precision="bf16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0 of 2", "1 of 2"]


def test_notebook_launcher_on_one_process():
    """One process is this one."""
    called = []
    notebook_launcher(called.append, (3,), num_processes=1)
    assert called == [3]


def fail():
    raise ValueError("of the function")


def test_failures():
    """A function that fails raises here, with its own words."""
    with pytest.raises(LaunchError, match="of the function"):
        debug_launcher(fail)
    with pytest.raises(ValueError, match="of the function"):
        notebook_launcher(fail, num_processes=1)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"mixed_precision": "fp12"}, "write no, fp16, bf16 or fp8"),
        ({"num_nodes": 2}, "num_nodes"),
        ({"node_rank": 1}, "node_rank"),
        ({"master_addr": "10.0.0.1"}, "master_addr"),
        ({"num_processes": 0}, "num_processes"),
    ],
)
def test_refused_arguments(arguments, reason):
    """What cannot work in a notebook is an error that names the argument."""
    with pytest.raises(ConfigError, match=reason):
        notebook_launcher(fail, **{"num_processes": 2, **arguments})


def test_signatures():
    """The arguments and defaults are Accelerate's."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(notebook_launcher).parameters.items()}
    assert defaults == {
        "function": inspect.Parameter.empty, "args": (), "num_processes": None, "mixed_precision": "no", "use_port": "29500",
        "master_addr": "127.0.0.1", "node_rank": 0, "num_nodes": 1, "rdzv_backend": "static", "rdzv_endpoint": "", "rdzv_conf": None,
        "rdzv_id": "none", "max_restarts": 0, "monitor_interval": 0.1, "log_line_prefix_template": None,
    }  # fmt: skip
    assert list(inspect.signature(debug_launcher).parameters) == ["function", "args", "num_processes"]
