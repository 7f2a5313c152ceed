"""Ledger, memory, trackers, profiler and run folder on a device."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_clock import ledger_of
from guarded_run import delayed, network
from test_ledger_ranks import train_with_a_slow_rank
from torch.utils.data import DataLoader, TensorDataset

from slipstream import Accelerator
from slipstream.errors import ConfigError
from slipstream.observability.memory import report_if_out_of_memory
from slipstream.observability.options import LedgerKwargs, ProfileKwargs
from slipstream.observability.profiler import top_operators
from slipstream.testing import standin

QUIET = LedgerKwargs(summary=False, interval=60.0)


class Training:
    """A model, an optimizer and a loader of some batches on the device of the pool."""

    def __init__(self, batches: int = 6, **settings: Any) -> None:
        self.accelerator = Accelerator(kwargs_handlers=[QUIET], **settings)
        assert standin.is_enabled()
        assert self.accelerator.device.type == "standin"
        net = network(torch.float32)
        data = DataLoader(TensorDataset(torch.ones(4 * batches * self.accelerator.num_processes, 3)), batch_size=4)
        self.net, self.optimizer, self.loader = self.accelerator.prepare(net, torch.optim.AdamW(net.parameters()), data)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(x).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


# -- the ledger -----------------------------------------------------------------------------------------------------------


def measured() -> dict[str, Any]:
    """A loop on a device whose work takes a while, by a clock on the wall and by the ledger."""
    run = Training()
    ledger, waits = ledger_of(run.accelerator), []
    with delayed(kernels=0.001):
        for number, (x,) in enumerate(run.loader):
            if number == 1:
                began = time.perf_counter()
                before = ledger.report().seconds
            torch.standin.reset_counters()
            run.step(x)
            waits.append(torch.standin.counters().synchronizations)
        wall = time.perf_counter() - began
        report = ledger.finish()
    phases = {name: sum(values) for name, values in report.phases.items()}
    return {"wall": wall, "seconds": report.seconds - before, "phases": phases, "sum": report.seconds, "waits": waits,
            "steps": report.steps, "device": report.memory["device"]}  # fmt: skip


def test_device_clock(ranks: Any) -> None:
    """The ledger measures with the clock of the device, agrees with that on the wall, and makes no step wait."""
    [found] = ranks(1, device="standin").run(measured)
    assert found["steps"] == 6
    assert found["waits"] == [0] * 6
    assert found["seconds"] == pytest.approx(found["wall"], rel=0.2)
    assert sum(found["phases"].values()) == pytest.approx(found["sum"])
    assert all(found["phases"][name] > 0.005 for name in ("forward", "backward", "optimizer"))
    assert found["device"][0] > 0, "the most that the allocator had"


def test_time_of_copies(ranks: Any) -> None:
    """Time that the device takes for a copy counts where the device spent it: in the forward that waits for it, not in the next batch."""

    def run() -> Any:
        training = Training(batches=1)
        ledger = ledger_of(training.accelerator)
        for (x,) in training.loader:
            training.step(x)
        host = torch.ones(4, 3).pin_memory()
        with delayed(copies=0.05):
            for _ in range(3):
                x = host.to(training.accelerator.device, non_blocking=True)
                training.step(x)
        phases = ledger.finish().phases
        return {name: values[0] for name, values in phases.items()}

    [found] = ranks(1, device="standin").run(run)
    assert found["other"] + found["forward"] >= 0.15, found
    assert found["data"] < 0.05


def test_another_current_device(ranks: Any) -> None:
    """A script may make another device the current one: the ledger's marks stay in the queue of its own."""

    def run() -> Any:
        training = Training()
        ledger = ledger_of(training.accelerator)
        with torch.standin.device(2):
            for (x,) in training.loader:
                training.step(x)
            with delayed(copies=0.2):
                arriving = torch.ones(4).pin_memory().to(training.accelerator.device, non_blocking=True)
                ledger.meter.tick()
                passed = ledger._clock._events[-1].query()
                report = ledger.finish()
        return passed, report.steps, arriving.sum().item()

    assert ranks(1, device="standin").run(run) == [(False, 6, 4.0)]


def test_last_step_is_waited_for(ranks: Any) -> None:
    """The end of a run waits for the device: a step that it had not passed is in the report, with its time."""

    def run() -> Any:
        training = Training(batches=2)
        ledger, weight = ledger_of(training.accelerator), next(training.net.parameters())
        kept = torch.empty(weight.shape).pin_memory()
        training.optimizer.optimizer.register_step_post_hook(lambda *_: kept.copy_(weight.detach(), non_blocking=True))
        with delayed(copies=0.1):
            for (x,) in training.loader:
                training.step(x)
            passed = torch.standin.current_stream().query()
            report = ledger.finish()
        return passed, report.steps, report.phases["optimizer"][0]

    [(passed, steps, seconds)] = ranks(1, device="standin").run(run)
    assert not passed
    assert steps == 2
    assert seconds >= 0.19


def test_slow_rank(ranks: Any) -> None:
    """The table names the slow rank, and the others wait for it, also where each measures on its device."""
    main, other = ranks(2, device="standin").run(train_with_a_slow_rank, 1)
    assert (main["steps"], main["slowest"]) == (5, 1)
    assert "waited for most: rank 1" in main["table"]
    assert main["phases"]["waiting"][0] > 0.5 * other["slept"] > main["phases"]["waiting"][1]
    assert other["forward"] >= 0.9 * other["slept"]


# -- values and the run folder ------------------------------------------------------------------------------------------


def test_log_waits_once(ranks: Any, tmp_path: Path) -> None:
    """A call of log fetches all of its tensors together, on the process that writes them; the others fetch nothing."""

    def run() -> Any:
        training = Training(project_dir=str(tmp_path), log_with=["tensorboard"])
        accelerator = training.accelerator
        accelerator.init_trackers("demo", None, {"local": {"name": "one"}})
        for (x,) in training.loader:
            loss = training.step(x)
        torch.standin.reset_counters()
        ones = torch.ones(1, device=accelerator.device)
        accelerator.log({"loss": loss, "twice": loss.detach() * 2, "eval": {"ones": ones, "n": 3}}, step=1)
        counted = torch.standin.counters()
        accelerator.end_training()
        return counted.synchronizations, counted.copies_to_host, loss.item()

    (waits, copies, loss), other = ranks(2, device="standin").run(run)
    assert (waits, copies) == (1, 1)
    assert other[:2] == (0, 0)
    folder = tmp_path / "runs" / "one"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["values"] for line in lines if "values" in line] == [{"loss": loss, "twice": 2 * loss, "eval/ones": 1.0, "eval/n": 3}]
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["run: device"].startswith("standin:0: stand-in accelerator 0, ")
    assert facts["run: processes"] == "2"
    assert json.loads((folder / "ledger.jsonl").read_text().splitlines()[-1])["memory"]["device"][1] > 0


# -- out of memory ------------------------------------------------------------------------------------------------------


def test_out_of_memory(ranks: Any, tmp_path: Path) -> None:
    """When the memory of a device ends, the report says what is alive there, by name, and what its allocator counts."""

    def run() -> Any:
        training = Training(project_dir=str(tmp_path))
        training.accelerator.init_trackers("demo", None, {"local": {"name": "full"}})
        device = training.accelerator.device
        for (x,) in training.loader:
            training.step(x)
        most = torch.standin.mem_get_info(device)[1]
        kept = torch.ones(1 << 18, device=device)
        torch.standin.set_capacity(3 << 20, device)
        try:
            with pytest.raises(torch.OutOfMemoryError) as raised:
                torch.empty(4 << 20, device=device)
            report_if_out_of_memory(raised.value)
        finally:
            torch.standin.set_capacity(most, device)
        training.step(torch.ones(4, 3, device=device) * kept[0])  # the device works on
        return raised.value.__notes__

    [[note]] = ranks(1, device="standin").run(run)
    path = tmp_path / "runs" / "full" / "memory-rank0.json"
    assert note.endswith(f"all of it is in {path}")
    found = json.loads(path.read_text())
    assert found["by_device"]["standin:0"] >= 1 << 20
    assert {entry["name"] for entry in found["alive"] if entry["kind"] == "optimizer state" and entry["device"] == "standin:0"} >= {
        "exp_avg of 0.weight", "exp_avg_sq of 2.bias",
    }  # fmt: skip
    assert found["allocators"]["standin:0"]["failures"] >= 1
    assert found["allocators"]["standin:0"]["most_allocated"] >= found["allocators"]["standin:0"]["allocated"] >= 1 << 20


# -- the profiler -------------------------------------------------------------------------------------------------------


def test_profiler(ranks: Any, tmp_path: Path) -> None:
    """A device is recorded by its name; where its package tells torch's profiler nothing, the table says so."""

    def run(folder: str) -> Any:
        training = Training()
        x = torch.ones(4, 3, device=training.accelerator.device)
        texts = []
        for activities in (None, ["cpu", "standin"], ["cpu"]):
            with training.accelerator.profile(ProfileKwargs(activities=activities, output_trace_dir=folder)) as profiler:
                training.step(x)
            texts.append(str(top_operators(profiler)).partition(":")[0])
        with pytest.raises(ConfigError) as raised, training.accelerator.profile(ProfileKwargs(activities=["xpu"], output_trace_dir=folder)):
            pass
        return texts, str(raised.value)

    outcome = ranks(1, device="standin").outcomes(run, str(tmp_path))[0]
    texts, refused = outcome.value
    silent = "time of operators on the host (nothing was recorded on standin)"
    assert texts == [silent, silent, "time of operators on the host"]
    assert refused.endswith("it can record cpu, standin")
    assert "nothing was recorded, so there is no" not in outcome.output, "an activity that is refused is no recording without a step"
    assert (tmp_path / "profile_0.json").exists()
