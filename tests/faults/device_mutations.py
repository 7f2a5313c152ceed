"""Thirty mistakes that are made with accelerators, planted one at a time into a copy of the sources: which tests notice?

    python tests/faults/device_mutations.py [--only NAME ...] [--cpu | --standin] [--document]

Each mistake is a text of one file and what stands in its place: a tensor that is left on the host, a stream that is not waited for, a
value that is read too early. None of them changes results on the CPU, so most tests without a device cannot see them. For each, the
tests of its subject run twice: on the stand-in accelerator, and once more where there is none (its tests are skipped then). A test that
fails is run again by itself, with and without the mistake, to tell a mistake that is noticed from a test that fails now and then.
Prints a table; `--document` also puts it into docs/testing.md. Exits with 1 if the stand-in misses more than two.

The tree itself is never changed. `tests/faults/test_device_mutations.py` checks that each text still occurs exactly once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/testing.md"
BEGIN, END = "<!-- mutations: begin -->", "<!-- mutations: end -->"
MISSED_AT_MOST = 2
_COPIED = ("src", "tests", "pyproject.toml")
_PATIENCE = 900.0


@dataclass(frozen=True)
class Mutation:
    """A mistake: what it is, the text of a file of src/slipstream that is replaced, and the tests of its subject."""

    name: str
    mistake: str
    file: str
    old: str
    new: str
    standin: tuple[str, ...]
    """Test files that use the stand-in, the most likely first."""
    cpu: tuple[str, ...]
    """Further test files of the subject. Without the stand-in, these, `_WITHOUT_VALUES` and the others run."""

    def apply(self, text: str) -> str:
        """Return the source with the mistake."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its text occurs {text.count(self.old)} times in {self.file}: write what now stands there")
        return text.replace(self.old, self.new)


_TRAINING = "tests/training/test_standin_training.py"
_COSTS = "tests/training/test_standin_costs.py"
_GUARDS = "tests/observability/test_standin_guards.py"
_FSDP = "tests/strategies/test_standin_fsdp.py"
_COLLECTIVES = "tests/distributed/test_standin_collectives.py"
_DISPATCH = "tests/big_models/test_standin_dispatch.py"
_TRANSFER = "tests/big_models/test_standin_transfer.py"
_CHECKPOINTS = "tests/checkpoint/test_standin_checkpoints.py"
_RECORDING = "tests/observability/test_standin_recording.py"
_LATE = "tests/devices/test_late_read.py"
_WITHOUT_VALUES = "tests/devices/test_fake_cuda.py"
"""Training steps on a CUDA device that is not there, with tensors that have no values."""

MUTATIONS = (
    # -- things that stay on the host, or go to another device
    Mutation(
        "index ignored", "every process computes on device 0",
        "devices/table.py", "torch.device(family.type, local_rank % count)", "torch.device(family.type, 0)",
        (_COLLECTIVES, _TRAINING), ("tests/devices/test_table.py", "tests/distributed/test_state.py"),
    ),
    Mutation(
        "set_device forgotten", "the device of the process is not made the current one",
        "distributed/state.py", "            set_device(self.device)\n", "            pass\n",
        (_COLLECTIVES, _TRAINING), ("tests/devices/test_table.py", "tests/distributed/test_state.py"),
    ),
    Mutation(
        "buffers left", "prepare moves parameters, not buffers",
        "strategies/base.py", "        model.to(device)\n",
        "        for parameter in model.parameters():\n            parameter.data = parameter.data.to(device)\n",
        (_TRAINING,), ("tests/training/test_prepare.py", "tests/training/test_replicas.py"),
    ),
    Mutation(
        "evaluated model left", "a model that is only evaluated is not moved",
        "accelerator/preparation.py", "                original.to(components.state.device)\n", "                pass\n",
        (_TRAINING,), ("tests/training/test_prepare.py", "tests/training/test_several_models.py"),
    ),
    Mutation(
        "optimizer state left", "the state of an optimizer that has made steps is not moved with its parameters",
        "accelerator/preparation.py", "            move_state(optimizer)\n", "            pass\n",
        (_TRAINING,), ("tests/training/test_prepare.py", "tests/training/test_several_models.py"),
    ),
    Mutation(
        "loaded norm left", "the norm of the last clipping is on the host after a checkpoint is loaded",
        "training/clip.py", 'saved["norm"].to(device)', 'saved["norm"]',
        (_CHECKPOINTS, _TRAINING), ("tests/training/test_windows.py", "tests/training/test_loop_state.py"),
    ),
    Mutation(
        "restored state left", "a load that fails puts the state of the optimizer back, but leaves it on the host",
        "checkpoint/restore.py", "            kept[name] = kept[name].to(device)\n", "            kept[name] = kept[name]\n",
        (_CHECKPOINTS,), ("tests/checkpoint/test_refused_loading.py", "tests/checkpoint/test_restored_memory.py"),
    ),
    Mutation(
        "keyword inputs left", "the hook of a dispatched block moves positional inputs alone",
        "big_models/hooks/forward_hooks.py",
        "return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)",
        "return send_to_device(args, device), kwargs",
        (_DISPATCH,), ("tests/big_models/test_forward_hooks.py", "tests/big_models/test_dispatch_model.py"),
    ),
    Mutation(
        "replicas on device 0", "DistributedDataParallel is told device 0 on every process",
        "strategies/ddp.py", "[self._device.index] if", "[0] if",
        (_TRAINING,), ("tests/training/test_replicas.py", "tests/training/test_gradients.py"),
    ),
    Mutation(
        "mesh of the host", "the mesh of a sharded model is one of host memory",
        "strategies/fsdp.py", "self.sizes.build(self._device.type,", "self.sizes.build(CPU.type,",
        (_FSDP,), ("tests/strategies/test_fsdp.py", "tests/strategies/test_fsdp_training.py"),
    ),
    Mutation(
        "clip factor left", "the factor that clips offloaded shards stays on the device",
        "strategies/fsdp.py", "scale.to(device))", "scale)",
        (_FSDP,), ("tests/strategies/test_fsdp.py", "tests/strategies/test_fsdp_training.py"),
    ),
    # -- precision
    Mutation(
        "autocast of the host", "a prepared model runs in the autocast of the CPU",
        "precision/autocast.py", "with torch.autocast(self.device_type, self.dtype,", 'with torch.autocast("cpu", self.dtype,',
        (_TRAINING,), ("tests/precision/test_autocast.py", "tests/precision/test_amp.py"),
    ),
    Mutation(
        "loss scale on the host", "the change of the loss scale, by which waiting gradients are multiplied, is computed on the host",
        "precision/scaler.py", "one = torch.ones((), device=self._device_type)", "one = torch.ones(())",
        (_COSTS, _TRAINING), ("tests/precision/test_scaler.py", "tests/precision/test_amp.py"),
    ),
    # -- random states
    Mutation(
        "random state not saved", "a checkpoint has the random states of the host alone",
        "checkpoint/capture.py", '"random": rng.capture(),', '"random": rng.capture(["python", "numpy", "torch"]),',
        (_CHECKPOINTS, _FSDP), ("tests/checkpoint/test_save_state.py", "tests/checkpoint/test_complete.py", "tests/devices/test_rng.py"),
    ),
    Mutation(
        "random state of another device", "a state goes to the device with its number, not to the one that the process computes on",
        "devices/rng.py", "            places[_current_device(family)] = states[own]\n", "            pass\n",
        (_COLLECTIVES, _CHECKPOINTS), ("tests/devices/test_rng.py", "tests/distributed/test_synchronize_rng.py"),
    ),
    # -- collectives
    Mutation(
        "gather through the host", "tensors of the device are gathered in host memory, and copied there and back",
        "distributed/collectives.py",
        "flat = torch.zeros(longest, dtype=torch.uint8, device=remote[0][1].tensor.device)",
        "flat = torch.zeros(longest, dtype=torch.uint8)",
        (_COLLECTIVES,), ("tests/distributed/test_collectives.py", "tests/distributed/test_unusual_data.py"),
    ),
    # -- streams and events
    Mutation(
        "copy not waited for", "the computation does not wait for the weights that are copied on a side stream",
        "big_models/weight_store/transfer.py", "        current.wait_event(found.event)\n", "",
        (_TRANSFER,), ("tests/big_models/test_weight_store.py", "tests/big_models/test_offloaded_state.py"),
    ),
    Mutation(
        "record_stream forgotten", "memory of a weight is reused while the computation still reads it",
        "big_models/weight_store/transfer.py", "            tensor.record_stream(current)\n", "            pass\n",
        (_TRANSFER,), ("tests/big_models/test_weight_store.py", "tests/big_models/test_offloaded_state.py"),
    ),
    Mutation(
        "pinned buffer reused", "the next weights are put into a pinned buffer that is still being copied from",
        "big_models/weight_store/transfer.py", "            stage.event.synchronize()\n", "            pass\n",
        (_TRANSFER,), ("tests/big_models/test_weight_store.py", "tests/big_models/test_offloaded_state.py"),
    ),
    Mutation(
        "no prefetch", "the next block is copied when it is needed, not while the one before it runs",
        "big_models/weight_store/transfer.py", "        if following is not self.block:\n", "        if following is None:\n",
        (_TRANSFER,), ("tests/big_models/test_weight_store.py", "tests/big_models/test_layer_major.py"),
    ),
    Mutation(
        "save not waited for", "an async save writes its copies before the device has made them",
        "checkpoint/arena.py", "ready=partial(_wait, list(self._events.values()))", "ready=partial(_wait, [])",
        (_CHECKPOINTS,), ("tests/checkpoint/test_arena.py", "tests/checkpoint/test_async_save.py"),
    ),
    Mutation(
        "event before the copies", "an async save waits for an event that was recorded before its copies",
        "checkpoint/arena.py",
        "            event.record(torch.accelerator.current_stream(device))\n        pending", "            del event\n        pending",
        (_CHECKPOINTS,), ("tests/checkpoint/test_arena.py", "tests/checkpoint/test_async_save.py"),
    ),
    Mutation(
        "read before a synchronise", "values that a guard asks for are read before the device has computed them",
        "devices/late_read.py", "            self._event.synchronize()\n", "            pass\n",
        (_LATE, _GUARDS), ("tests/observability/test_guard_ranks.py", "tests/observability/test_guard_monitor.py"),
    ),
    Mutation(
        "device clock not waited for", "the last steps of a run are missing from its ledger: the device had not passed them",
        "observability/timing/ledger.py", "                self._clock.wait(wait)\n", "                pass\n",
        (_RECORDING, _GUARDS), ("tests/observability/test_ledger.py", "tests/observability/test_ledger_ranks.py"),
    ),
    # -- waits that cost time
    Mutation(
        "loss read in each step", "the ledger reads the loss with item()",
        "training/stepper.py", "kept = loss.item() if loss.is_cpu and loss.numel() == 1", "kept = loss.item() if loss.numel() == 1",
        (_COSTS, _GUARDS), ("tests/training/test_cost.py", "tests/observability/test_guard_monitor.py"),
    ),
    Mutation(
        "norm read in each step", "the guard reads the norm of the gradients with item()",
        "observability/guards/monitor.py", "norm.item() if norm.is_cpu else norm)", "norm.item())",
        (_GUARDS, _COSTS), ("tests/training/test_cost.py", "tests/observability/test_guard_monitor.py"),
    ),
    Mutation(
        "non_blocking ignored", "the host waits for each batch to be copied",
        "data/loader.py", "partial(send_to_device, device=device, non_blocking=non_blocking)", "partial(send_to_device, device=device)",
        (_COSTS,), ("tests/data/test_map_loader.py", "tests/distributed/test_pytree.py"),
    ),
    # -- memory
    Mutation(
        "cache not emptied", "release_memory and free_memory keep the device's cached memory",
        "devices/memory.py", '            family.ask("empty_cache")\n', "            pass\n",
        (_TRAINING, _DISPATCH), ("tests/devices/test_memory.py", "tests/training/test_batch_size.py"),
    ),
    Mutation(
        "out of memory not recognised", "find_executable_batch_size takes it for an error of the script",
        "devices/memory.py", "isinstance(exception, MemoryError | torch.OutOfMemoryError)", "isinstance(exception, MemoryError)",
        (_TRAINING,), ("tests/devices/test_memory.py", "tests/training/test_batch_size.py"),
    ),
    Mutation(
        "weights not freed", "offloaded blocks stay on the device after they have run",
        "big_models/weight_store/transfer.py", "        self.transfer.keep((self.block, following))\n", "",
        (_TRANSFER, _DISPATCH), ("tests/big_models/test_weight_store.py", "tests/big_models/test_offloaded_state.py"),
    ),
)  # fmt: skip
"""The table. Read a line as: someone made this mistake; which test tells them?"""


@dataclass(frozen=True)
class Finding:
    """What one run of the tests said: the test that failed, or nothing."""

    noticed_by: str = ""
    seconds: float = 0.0


class Bench:
    """A copy of the tree in which mistakes are planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        for path in ROOT.iterdir():
            if path.name not in _COPIED and path.name not in (".git", ".venv", ".pytest_cache"):
                (folder / path.name).symlink_to(path)
        found = subprocess.run(
            [sys.executable, "-c", "import slipstream; print(slipstream.__file__)"],
            env=self._environ(standin=True), cwd=folder, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        if not Path(found.strip()).is_relative_to(folder):
            raise SystemExit(f"the tests would import {found.strip()}, not the copy in {folder}")

    def _environ(self, *, standin: bool) -> dict[str, str]:
        variables = {name: value for name, value in os.environ.items() if name not in ("CI", "SLIPSTREAM_DEVICE", "PYTEST_ADDOPTS")}
        variables["PYTHONPATH"] = str(self.folder / "src")
        if not standin:  # a cache folder that cannot be made: tests on it are skipped
            variables["SLIPSTREAM_STANDIN_CACHE"] = "/dev/null/none"
        return variables

    @contextmanager
    def planted(self, mutation: Mutation) -> Iterator[None]:
        """Within the block, the copy has the mistake."""
        path = self.folder / "src/slipstream" / mutation.file
        text = path.read_text()
        path.write_text(mutation.apply(text))
        try:
            self._forget_compiled(path)
            yield
        finally:
            path.write_text(text)
            self._forget_compiled(path)

    @staticmethod
    def _forget_compiled(path: Path) -> None:
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def failures(self, tests: Iterable[str], *, standin: bool) -> list[str]:
        """Run tests until one fails; return its name, or nothing."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(
            command, env=self._environ(standin=standin), cwd=self.folder, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        if done.returncode not in (0, 1) or bool(failed) != bool(done.returncode):
            raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return failed[:1]

    def look(self, mutation: Mutation, *, standin: bool) -> Finding:
        """Return the test that notices a mistake, if there is one: it fails each time with the mistake, and passes without."""
        began = time.monotonic()
        tests = mutation.standin if standin else (*mutation.cpu, _WITHOUT_VALUES, *mutation.standin)
        doubtful: list[str] = []
        while True:
            with self.planted(mutation):
                failed = self.failures([*tests, *(f"--deselect={test}" for test in doubtful)], standin=standin)
                again = bool(failed) and bool(self.failures(failed, standin=standin))
            if not failed or (again and any(not self.failures(failed, standin=standin) for _ in range(2))):
                return Finding("".join(failed), time.monotonic() - began)
            print(f"  {failed[0]} fails now and then, or without the mistake", file=sys.stderr, flush=True)
            doubtful += failed


def render(mutations: Iterable[Mutation], found: Mapping[str, Mapping[bool, Finding]]) -> str:
    """Return the table as Markdown."""
    lines = ["| mistake | where | on the stand-in | on the CPU alone |", "|---|---|---|---|"]
    for mutation in mutations:
        cells = [f"**{mutation.name}**: {mutation.mistake}", f"`{mutation.file}`"]
        for standin in (True, False):
            finding = found[mutation.name].get(standin)
            cells.append("" if finding is None else f"`{_short(finding.noticed_by)}`" if finding.noticed_by else "no")
        lines.append(f"| {' | '.join(cells)} |")
    for standin, words in ((True, "on the stand-in"), (False, "on the CPU alone")):
        known = [findings[standin] for findings in found.values() if standin in findings]
        if known:
            lines += ["", f"Noticed {words}: {sum(bool(finding.noticed_by) for finding in known)} of {len(known)}."]
    return "\n".join(lines)


def _short(test: str) -> str:
    path, _, name = test.partition("::")
    return f"{Path(path).name}::{name.partition('[')[0]}"


def document(table: str) -> None:
    """Put the table into its place in the documentation."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[mutation.name for mutation in MUTATIONS], help="only these mistakes")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cpu", action="store_true", help="only the run without the stand-in")
    where.add_argument("--standin", action="store_true", help="only the run on the stand-in")
    parser.add_argument("--document", action="store_true", help="put the table into docs/testing.md")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if not options.only or mutation.name in options.only]
    if options.document and (options.only or options.cpu or options.standin):
        parser.error("--document writes the whole table: leave out --only, --cpu and --standin")
    runs = [True] if options.standin else [False] if options.cpu else [True, False]
    found: dict[str, dict[bool, Finding]] = {}
    with tempfile.TemporaryDirectory(prefix="slipstream-mutations-") as folder:
        bench = Bench(Path(folder))
        for mutation in chosen:
            found[mutation.name] = {standin: bench.look(mutation, standin=standin) for standin in runs}
            told = ", ".join(
                f"{'stand-in' if standin else 'CPU alone'}: {finding.noticed_by or 'not noticed'} ({finding.seconds:.0f} s)"
                for standin, finding in found[mutation.name].items()
            )
            print(f"{mutation.name}: {told}", file=sys.stderr, flush=True)
    table = render(chosen, found)
    print(table)
    if options.document:
        document(table)
    missed = [name for name, findings in found.items() if True in findings and not findings[True].noticed_by]
    return int(len(missed) > MISSED_AT_MOST)


if __name__ == "__main__":
    sys.exit(main())
