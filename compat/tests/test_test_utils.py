"""`accelerate.test_utils`: what scripts and test suites import from it, and the scripts that it brings along."""

from __future__ import annotations

import subprocess
import sys
import unittest

import pytest
import torch
from accelerate.commands.test import test_command as run_test_command, test_command_parser as make_test_parser
from accelerate.test_utils import testing
from accelerate.test_utils.training import RegressionDataset, RegressionModel

NAMES = """cpu non_cpu cuda cuda_or_hpu cuda_or_xpu xpu non_xpu non_hpu fp16 fp8 fsdp2 mlu sdaa musa npu neuron mps huggingface_suite
    datasets transformers timm torchvision triton schedulefree bnb tpu non_torch_xla single_device single_gpu single_xpu multi_device
    multi_gpu multi_xpu multi_gpu_or_xpu deepspeed tp torch_min_version tensorboard wandb trackio comet_ml aim clearml dvclive swanlab
    pandas mlflow pippy import_timer transformer_engine transformer_engine_mxfp8 torchao matplotlib trackers
    torchdata_stateful_dataloader peft"""
SCRIPTS = testing.path_in_accelerate_package("test_utils", "scripts")


def test_every_decorator_is_there():
    """All `require_...` of Accelerate exist, and the others beside them."""
    missing = [name for name in NAMES.split() if not hasattr(testing, f"require_{name}")]
    missing += [name for name in ("slow", "skip", "run_first") if not hasattr(testing, name)]
    assert not missing


def outcome_of(decorator) -> str:
    class Case(unittest.TestCase):
        @decorator
        def test(self) -> None:
            pass

    result = unittest.TestResult()
    Case("test").run(result)
    return "skipped" if result.skipped else "ran"


def test_decorators_skip_by_what_is_there():
    """A test runs where its requirement is met, and is skipped otherwise, with the reason."""
    present = torch.accelerator.is_available()
    assert outcome_of(testing.require_cpu) == ("skipped" if present else "ran")
    assert outcome_of(testing.require_non_cpu) == ("ran" if present else "skipped")
    assert outcome_of(testing.require_deepspeed) == "skipped"
    assert outcome_of(testing.require_torch_min_version(version="2.0")) == "ran"
    assert outcome_of(testing.require_torch_min_version(version="99")) == "skipped"
    assert outcome_of(testing.skip) == "skipped"


def test_slow(monkeypatch):
    """Slow tests run where RUN_SLOW is set."""
    monkeypatch.delenv("RUN_SLOW", raising=False)
    assert outcome_of(testing.slow) == "skipped"
    monkeypatch.setenv("RUN_SLOW", "yes")
    assert outcome_of(testing.slow) == "ran"


def test_commands():
    """Commands run to their end with their output; a failure raises with it."""
    assert testing.run_command([sys.executable, "-c", "print(3)"], return_stdout=True) == "3\n"
    with pytest.raises(testing.SubprocessCallException, match="oh no"):
        testing.run_command([sys.executable, "-c", "raise SystemExit('oh no')"])
    with pytest.raises(RuntimeError, match="oh no"):
        testing.execute_subprocess_async([sys.executable, "-c", "raise SystemExit('oh no')"], quiet=True, echo=False)
    with pytest.raises(TimeoutError, match="did not end"):
        testing.execute_subprocess_async([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2, quiet=True, echo=False)


def test_cases():
    """The base classes own a folder, forget states and stop mocks."""

    class Case(testing.TempDirTestCase, testing.AccelerateTestCase):
        def test(self) -> None:
            from accelerate import Accelerator

            (self.tmpdir / "file").touch()
            Accelerator(cpu=True)

    result = unittest.TestResult()
    unittest.TestSuite([Case("test")]).run(result)
    assert result.wasSuccessful(), result.errors
    from accelerate.state import AcceleratorState

    assert not AcceleratorState._shared_state
    assert not Case.tmpdir.exists()


def test_regression_problem():
    """The data lies near the line that the model learns."""
    data = RegressionDataset(a=2, b=3, length=64, seed=1)
    points = [data[index] for index in range(len(data))]
    assert all(abs(2 * point["x"] + 3 - point["y"]) < 1 for point in points)
    model = RegressionModel(a=2, b=3, double_output=True)
    assert [output.item() for output in model(torch.tensor(1.0))] == [5.0, 5.0]


def test_launch_command():
    """Options become words: switches without a value, nothing for None."""
    assert testing.get_launch_command(num_processes=2, use_fsdp=True, config_file=None, debug=False)[:2] == ["accelerate", "launch"]
    assert "--num_processes=2" in testing.DEFAULT_LAUNCH_COMMAND or testing.device_count != 2


@pytest.mark.parametrize("num_processes", [1, 2])
def test_accelerate_test(num_processes, tmp_path, capfd):
    """`accelerate test` passes on one and on two processes."""
    config = tmp_path / "config.yaml"
    kind = "NO" if num_processes == 1 else "MULTI_CPU"
    config.write_text(f"{{compute_environment: LOCAL_MACHINE, distributed_type: '{kind}', use_cpu: true, num_processes: {num_processes}}}")
    run_test_command(make_test_parser().parse_args(["--config_file", str(config)]))
    assert "Everything that was checked works." in capfd.readouterr().out


@pytest.mark.parametrize("script", ["test_cli", "test_ddp_comm_hook", "test_distributed_data_loop", "test_ops", "test_sync"])
def test_scripts_on_two_processes(launch, script):
    """The other scripts of the package pass on two processes."""
    launch(SCRIPTS / f"{script}.py", 2)


def test_no_torch_for_the_path():
    """Finding a script of the package imports little."""
    code = "import accelerate.test_utils, sys; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
