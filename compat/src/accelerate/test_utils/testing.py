"""What tests of programs that use `accelerate` need: skipping by capability, temporary folders, and starting commands.

Every `require_*` decorator stands in one table (`_REQUIREMENTS`): its name, what a skipped test is told, and the question that decides it.
The questions are asked when a test is decorated, so importing this module probes nothing but the device.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from accelerate._forwarding import forward_names

_FORWARDED, _find_forwarded, __dir__ = forward_names(
    __name__,
    {
        "accelerate.state": "AcceleratorState GradientState PartialState",
        "accelerate.utils.environment": "check_cuda_fp8_capability parse_flag_from_env str_to_bool",
        "accelerate.utils.imports": """is_aim_available is_bnb_available is_clearml_available is_comet_ml_available
            is_cuda_available is_datasets_available is_deepspeed_available is_dvclive_available
            is_fp16_available is_fp8_available is_habana_gaudi1 is_hpu_available
            is_import_timer_available is_matplotlib_available is_mlflow_available is_mlu_available
            is_mps_available is_musa_available is_neuron_available is_npu_available is_pandas_available
            is_peft_available is_pippy_available is_pytest_available is_schedulefree_available
            is_sdaa_available is_swanlab_available is_tensorboard_available is_timm_available
            is_torch_xla_available is_torchao_available is_torchdata_stateful_dataloader_available
            is_torchvision_available is_trackio_available is_transformer_engine_available
            is_transformer_engine_mxfp8_available is_transformers_available is_triton_available
            is_wandb_available is_xpu_available""",
        "accelerate.utils.operations": "gather",
        "accelerate.utils.versions": "compare_versions is_torch_version",
    },
)

Test = TypeVar("Test")
Decorator = Callable[[Test], Test]


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the kind of device that tests run on, how many there are, and the function that reads the memory allocated on it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu", 1, lambda: 0
    module = getattr(torch, accelerator.type)
    return accelerator.type, module.device_count(), getattr(module, "memory_allocated", lambda: 0)


torch_device, device_count, memory_allocated_func = get_backend()


def __getattr__(name: str) -> Any:
    if name == "_run_slow_tests":  # asked at each use, so that a test may set RUN_SLOW
        return _flag("RUN_SLOW")
    return _find_forwarded(name)


def _flag(variable: str) -> bool:
    return bool(_find_forwarded("parse_flag_from_env")(variable, default=False))


def _available(library: str, **options: Any) -> bool:
    return bool(_find_forwarded(f"is_{library}_available")(**options))


def _torch_at_least(version: str) -> bool:
    return bool(_find_forwarded("is_torch_version")(">=", version))


def _a_tracker_is_available() -> bool:
    # comet_ml replaces functions of other trackers when it is imported, so tests of those cannot run beside it
    return any(map(_available, ("wandb", "tensorboard", "trackio", "swanlab"))) and not _available("comet_ml")


def _on(*devices: str) -> Callable[[], bool]:
    return lambda: torch_device in devices


def _not_on(device: str) -> Callable[[], bool]:
    return lambda: torch_device != device


def _needs(*libraries: str) -> Callable[[], bool]:
    return lambda: all(map(_available, libraries))


_PACKAGES = """aim bnb clearml comet_ml datasets deepspeed dvclive matplotlib mlflow pandas peft schedulefree swanlab tensorboard timm
    torchao torchvision trackio transformers triton wandb"""
_REQUIREMENTS: dict[str, tuple[str, Callable[[], bool]]] = {
    "require_cpu": ("a machine whose only device is the CPU", _on("cpu")),
    "require_non_cpu": ("an accelerator (GPU, XPU, ...)", _not_on("cpu")),
    "require_cuda": ("a CUDA device", lambda: _available("cuda") and not _available("torch_xla")),
    "require_cuda_or_hpu": ("a CUDA or HPU device", lambda: _on("cuda", "hpu")() and not _available("torch_xla")),
    "require_cuda_or_xpu": ("a CUDA or XPU device", lambda: _on("cuda", "xpu")() and not _available("torch_xla")),
    "require_xpu": ("an XPU device", _needs("xpu")),
    "require_non_xpu": ("a device other than XPU", _not_on("xpu")),
    "require_non_hpu": ("a device other than HPU", _not_on("hpu")),
    "require_mlu": ("an MLU device", _needs("mlu")),
    "require_sdaa": ("an SDAA device", _needs("sdaa")),
    "require_musa": ("a MUSA device", _needs("musa")),
    "require_npu": ("an NPU device", _needs("npu")),
    "require_neuron": ("a Neuron device", _needs("neuron")),
    "require_mps": ("an MPS device", _needs("mps")),
    "require_tpu": ("a TPU", lambda: _available("torch_xla", check_is_tpu=True)),
    "require_non_torch_xla": ("an environment without torch_xla", lambda: not _available("torch_xla")),
    "require_single_device": ("exactly one accelerator", lambda: torch_device != "cpu" and device_count == 1),
    "require_single_gpu": ("exactly one GPU", lambda: torch_device == "cuda" and device_count == 1),
    "require_single_xpu": ("exactly one XPU", lambda: torch_device == "xpu" and device_count == 1),
    "require_multi_device": ("several accelerators", lambda: device_count > 1),
    "require_multi_gpu": ("several GPUs", lambda: torch_device == "cuda" and device_count > 1),
    "require_multi_xpu": ("several XPUs", lambda: torch_device == "xpu" and device_count > 1),
    "require_multi_gpu_or_xpu": ("several GPUs or XPUs", lambda: torch_device in ("cuda", "xpu") and device_count > 1),
    "require_fp16": ("a device that computes in fp16", _needs("fp16")),
    "require_fp8": ("a library for fp8 and a device that has it", lambda: _available("fp8") and torch_device != "cpu"),
    "require_fsdp2": ("torch 2.5 or newer, for FSDP2", lambda: _torch_at_least("2.5.0")),
    "require_tp": ("torch 2.3 or newer, for tensor parallelism", lambda: _torch_at_least("2.3.0") and _available("transformers")),
    "require_huggingface_suite": ("transformers and datasets", _needs("transformers", "datasets")),
    "require_trackers": ("at least one tracker, and comet_ml not installed", _a_tracker_is_available),
    "require_torchdata_stateful_dataloader": ("torchdata's StatefulDataLoader", _needs("torchdata_stateful_dataloader")),
    "require_import_timer": ("tuna's import_timer", _needs("import_timer")),
    "require_pippy": ("torch.distributed.pipelining", _needs("pippy")),
    "require_transformer_engine": ("TransformerEngine", _needs("transformer_engine")),
    "require_transformer_engine_mxfp8": ("TransformerEngine with MXFP8", _needs("transformer_engine_mxfp8")),
    **{
        f"require_{library}": (f"the package {library}", _needs(library))
        for library in _PACKAGES.split()
    },
}


def _make_decorator(name: str, what: str, holds: Callable[[], bool]) -> Decorator[Any]:
    def require(test_case: Test) -> Test:
        return unittest.skipUnless(holds(), f"needs {what}")(test_case)  # type: ignore[arg-type, return-value]

    require.__name__ = require.__qualname__ = name
    require.__doc__ = f"Skip a test, or a test case, unless there is: {what}."
    return require


globals().update({name: _make_decorator(name, what, holds) for name, (what, holds) in _REQUIREMENTS.items()})


def require_torch_min_version(test_case: Test | None = None, version: str | None = None) -> Any:
    """Skip a test with a torch older than `version`; also `@require_torch_min_version(version="2.9")`."""
    if test_case is None:
        return partial(require_torch_min_version, version=version)
    if version is None:
        raise ValueError('require_torch_min_version needs the version: @require_torch_min_version(version="2.9")')
    return unittest.skipUnless(_torch_at_least(version), f"needs torch {version} or newer")(test_case)  # type: ignore[arg-type]


def slow(test_case: Test) -> Test:
    """Skip a test unless RUN_SLOW is set to a true value."""
    return unittest.skipUnless(_flag("RUN_SLOW"), "slow: set RUN_SLOW=1 to run it")(test_case)  # type: ignore[arg-type, return-value]


def skip(test_case: Test) -> Test:
    """Skip a test always."""
    return unittest.skip("skipped on purpose")(test_case)  # type: ignore[arg-type, return-value]


def run_first(test_case: Test) -> Test:
    """Ask pytest (with the plugin pytest-order) to run a test before the others."""
    import pytest

    return pytest.mark.order(1)(test_case)


class TempDirTestCase(unittest.TestCase):
    """A test case whose class owns a folder, `tmpdir`. It is emptied before each test unless `clear_on_setup` is False."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        shutil.rmtree(cls.tmpdir, ignore_errors=True)
        super().tearDownClass()

    def setUp(self) -> None:
        super().setUp()
        if self.clear_on_setup:
            for entry in self.tmpdir.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()


class AccelerateTestCase(unittest.TestCase):
    """A test case that leaves no state behind: the next test makes its own `Accelerator`."""

    def tearDown(self) -> None:
        super().tearDown()
        _find_forwarded("AcceleratorState")._reset_state(reset_partial_state=True)


class MockingTestCase(unittest.TestCase):
    """A test case for mocks that should last for one whole test."""

    def add_mocks(self, mocks: Any) -> None:
        """Start a mock, or several, and stop them when the test ends."""
        self.mocks = list(mocks) if isinstance(mocks, (list, tuple)) else [mocks]
        for started in self.mocks:
            started.start()
            self.addCleanup(started.stop)


class SubprocessCallException(Exception):
    """A command that was started by `run_command` failed; the message has its output."""


class _RunOutput:
    """How a command ended, and the lines it wrote."""

    def __init__(self, returncode: int | None, stdout: list[str], stderr: list[str]) -> None:
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr


async def _collect_lines(stream: asyncio.StreamReader, lines: list[str], label: str, echo_to: IO[str] | None) -> None:
    while line := await stream.readline():
        text = line.decode("utf-8", errors="replace").rstrip("\r\n")
        lines.append(text)
        if echo_to is not None:
            print(label, text, file=echo_to, flush=True)


async def _run(cmd: list[str], env: Mapping[str, str] | None, stdin: Any, timeout: float | None, loud: bool, echo: bool) -> _RunOutput:
    if echo:
        print("\nRunning: ", " ".join(cmd))
    process = await asyncio.create_subprocess_exec(
        *cmd, stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env, limit=2**24
    )
    assert process.stdout is not None
    assert process.stderr is not None
    stdout: list[str] = []
    stderr: list[str] = []
    reading = asyncio.gather(
        _collect_lines(process.stdout, stdout, "stdout:", sys.stdout if loud else None),
        _collect_lines(process.stderr, stderr, "stderr:", sys.stderr if loud else None),
        process.wait(),
    )
    try:
        await asyncio.wait_for(reading, timeout)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        raise TimeoutError(f"`{' '.join(cmd)}` did not end within {timeout} s") from None
    return _RunOutput(process.returncode, stdout, stderr)


def execute_subprocess_async(
    cmd: Sequence[Any],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float | None = 180,
    quiet: bool = False,
    echo: bool = True,
) -> _RunOutput:
    """Run a command, show its output while it runs, and return it; raise RuntimeError with its errors if it fails.

    >>> execute_subprocess_async([sys.executable, "-c", "print(3)"], quiet=True, echo=False).stdout
    ['3']
    """
    words = [str(word) for word in cmd]
    result = asyncio.run(_run(words, env, stdin, timeout, not quiet, echo))
    if result.returncode:
        errors = "\n".join(result.stderr)
        raise RuntimeError(f"`{' '.join(words)}` ended with exit code {result.returncode}. It wrote to stderr:\n{errors}")
    return result


def run_command(command: Sequence[Any], return_stdout: bool = False, env: Mapping[str, str] | None = None) -> str | None:
    """Run a command to its end; raise SubprocessCallException with its output if it fails. Return the output if asked to.

    >>> run_command([sys.executable, "-c", "print(3)"], return_stdout=True)
    '3\\n'
    """
    words = [str(word) for word in command]
    try:
        output = subprocess.check_output(words, stderr=subprocess.STDOUT, env=None if env is None else dict(env))
    except subprocess.CalledProcessError as error:
        text = error.output.decode("utf-8", errors="replace")
        raise SubprocessCallException(f"`{' '.join(words)}` ended with exit code {error.returncode}. It wrote:\n\n{text}") from error
    return output.decode("utf-8", errors="replace") if return_stdout else None


def get_launch_command(**kwargs: Any) -> list[str]:
    """Return the words of an `accelerate launch` command with these options.

    >>> get_launch_command(num_processes=2, cpu=True, config_file=None)
    ['accelerate', 'launch', '--num_processes=2', '--cpu']
    """
    words = ["accelerate", "launch"]
    for option, value in kwargs.items():
        if value is True:
            words.append(f"--{option}")
        elif value is not None:
            words.append(f"--{option}={value}")
    return words


DEFAULT_LAUNCH_COMMAND = get_launch_command(num_processes=device_count, monitor_interval=0.1)


def path_in_accelerate_package(*components: str) -> Path:
    """Return the path of a file of this package."""
    return Path(__file__).resolve().parents[1].joinpath(*components)


def pytest_xdist_worker_id() -> int:
    """Return the number of this pytest-xdist worker, 0 without xdist."""
    digits = "".join(filter(str.isdigit, os.environ.get("PYTEST_XDIST_WORKER", "gw0")))
    return int(digits or 0)


def get_torch_dist_unique_port() -> int:
    """Return a rendezvous port that no other pytest-xdist worker uses."""
    return 29500 + pytest_xdist_worker_id()


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call a function and return what it printed.

    >>> capture_call_output(print, "hello")
    'hello\\n'
    """
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        func(*args, **kwargs)
    return printed.getvalue()


@contextlib.contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Fail unless the block raises `exception_class` with `msg` in its message.

    >>> with assert_exception(ValueError, "invalid literal"):
    ...     int("x")
    """
    try:
        yield
    except exception_class as error:
        if msg is not None and msg not in str(error):
            raise AssertionError(f"{exception_class.__name__} was raised, but {msg!r} is not in its message: {error}") from error
        return
    except Exception as error:
        raise AssertionError(f"expected {exception_class.__name__}, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"expected {exception_class.__name__}, but nothing was raised")


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the same on all processes (all of them call this)."""
    from accelerate.utils.operations import gather

    state = _find_forwarded("PartialState")()
    mine = tensor[None].clone().to(state.device)
    gathered = gather(mine).cpu()
    return all(torch.equal(gathered[rank], mine[0].cpu()) for rank in range(gathered.shape[0]))


_HELPERS = """AccelerateTestCase DEFAULT_LAUNCH_COMMAND MockingTestCase SubprocessCallException TempDirTestCase are_the_same_tensors
    assert_exception capture_call_output device_count execute_subprocess_async get_backend get_launch_command
    get_torch_dist_unique_port memory_allocated_func path_in_accelerate_package pytest_xdist_worker_id
    require_torch_min_version run_command run_first skip slow torch_device"""
__all__ = sorted({*_FORWARDED, *_REQUIREMENTS, *_HELPERS.split()})
