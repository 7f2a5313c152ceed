"""Save state that is sharded over ranks. Every rank must call it; an error names a rank that does not.

    begin    the writing rank opens a stage; the ranks agree on it
    write    each rank writes its shards into that stage, the writing rank also the shared state
    agree    each rank reports what it wrote, or its error; after an error nothing is committed and every rank raises
    commit   the writing rank commits and reports the outcome

With async saving the ranks also agree once every rank has its snapshot. Each then writes in the background and puts its report into the
rendezvous store; the writing rank waits for all reports and commits. No background thread takes part in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from slipstream.checkpoint.capture import Snapshot, capture_snapshot
from slipstream.checkpoint.full_tensors import FullTensors
from slipstream.checkpoint.weights import plan_shards
from slipstream.checkpoint.writer import (
    Destination,
    RankContribution,
    Stage,
    WrittenParts,
    adopt_hook_files,
    commit_manifest,
    open_destination,
    write_parts,
)
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files import strict_json
from slipstream.files.object_store import redact
from slipstream.logging import get_logger

if TYPE_CHECKING:
    from slipstream.checkpoint.saver import SaveOptions, Saver

__all__ = ["save_sharded"]

_LONGEST_ERROR: Final = 2000


def save_sharded(saver: Saver, output_dir: Any, options: SaveOptions) -> str:
    """Save and return the path of the checkpoint, which is complete unless the save is async. Every rank must call this."""
    with ExitStack() as cleanup:
        save = _ShardedSave(saver, options, cleanup)
        save.agree_on_target(saver.run_and_agree("save_state", partial(save.begin, output_dir)))
        if saver.save_hooks:  # they may raise on one rank alone, while others go on to what needs all ranks
            saver.run_and_agree("save_state", save.run_hooks)
        if options.async_save:
            save.check_positions(saver.run_and_agree("save_state", save.capture))
            save.cleanup = cleanup.pop_all()
            saver.background.start(f"the checkpoint {redact(save.target)}", save.write_async)
        else:
            if saver.components.strategy.saves_whole_weights:
                save.check_positions(saver.run_and_agree("save_state", save.capture))
                save.full = FullTensors(saver, save.whole, "save_state")
                reports = [(None, report) for report in saver.run_and_agree("save_state", save.write)]
            else:
                reports = saver.run_and_agree("save_state", lambda: [save.capture(), save.write()])
                save.check_positions([position for position, _ in reports])
            saver.run_and_agree("save_state", lambda: save.commit([RankContribution.from_dict(report) for _, report in reports]))
    return save.target


@dataclass
class _ShardedSave:
    """The steps of one save on one rank. Each returns its report to the other ranks."""

    saver: Saver
    options: SaveOptions
    cleanup: ExitStack
    """Abandons the stage unless it is committed."""
    target: str = ""
    ticket: str | None = None
    """The name of the stage that the writing rank opened."""
    destination: Destination = field(init=False)
    stage: Stage = field(init=False)
    snapshot: Snapshot = field(init=False)
    written: WrittenParts = field(init=False)
    weights: dict[int, dict[str, Any]] | None = None
    """The weights by model number, once hooks have run."""
    whole: dict[Any, Any] = field(default_factory=dict)
    """Weights that are written whole, in the order of the files."""
    full: FullTensors | None = None

    def begin(self, output_dir: Any) -> list[Any]:
        saver = self.saver
        saver.background.wait()
        if saver.project.save_on_each_node:
            raise ConfigError(
                "ProjectConfiguration(save_on_each_node=True) does not work with sharded state: no machine has all "
                "of it. Leave it out, and save to a folder that all machines share, or to a URL"
            )
        self.target = saver.target(output_dir)
        self.destination = open_destination(self.target, saver.disk)
        if saver.writes:
            self._enter(self.destination.begin())
            self.ticket = self.stage.ticket
        return [self.target, self.ticket, saver.project.iteration]

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self.cleanup.callback(stage.abandon)  # does nothing once it is committed

    def agree_on_target(self, reports: list[Any]) -> None:
        """Adopt the target, the ticket and the checkpoint number of the writing rank."""
        target, self.ticket, iteration = next(report for report in reports if report[1] is not None)
        if self.saver.folder is not None:
            self.target, self.destination = target, open_destination(target, self.saver.disk)
            self.saver.project.iteration = iteration + 1
        elif any(report[0] != target for report in reports):
            given = ", ".join(f"rank {rank}: {report[0]!r}" for rank, report in enumerate(reports))
            raise ConfigError(f"save_state was given different folders ({given}): sharded state needs one folder")

    def run_hooks(self) -> None:
        """Run the save hooks, and keep the weights that they leave to us."""
        if not self.saver.writes:
            self._enter(self.destination.join(str(self.ticket)))
        self.weights = self.saver.take_weights(str(self.stage.folder))

    def capture(self) -> list[str]:
        """Capture what this rank will write."""
        saver, options = self.saver, self.options
        if self.weights is None:
            self.run_hooks()
        weights, self.weights = self.weights, None
        snapshot = capture_snapshot(
            saver.components, saver.run_id, saver.objects, weights, options.metric, shards=[], in_shards=options.async_save
        )
        if saver.components.strategy.saves_whole_weights:
            self._plan_whole(snapshot)
        if not saver.writes:
            snapshot = replace(snapshot, models=(), optimizers=(), training=None, objects=())
        self.snapshot = saver.arena.keep(snapshot) if self.options.async_save else snapshot
        return [snapshot.facts.stamp, *(part.base for part in snapshot.shards)]

    def _plan_whole(self, snapshot: Snapshot) -> None:
        """Decide in which order sharded weights are put together for whole files."""
        if self.options.async_save:
            get_logger(__name__).warning_once(
                "save_state(async_save=True) writes the weights in shards: state_dict_type='FULL_STATE_DICT' needs every process until "
                "they are on the disk. slipstream merge-weights makes one file of them."
            )
            return
        for model in snapshot.models:
            frozen = model.frozen if self.options.dedup else frozenset()
            for group in plan_shards(model.tensors, self.options.shard_bytes, frozen):
                self.whole |= {(model.base, name): model.tensors[name] for name in group}

    def check_positions(self, positions: list[Any]) -> None:
        if any(position != positions[0] for position in positions):
            found = "; ".join(f"rank {rank}: {stamp}, {', '.join(parts) or 'nothing'}" for rank, (stamp, *parts) in enumerate(positions))
            raise CheckpointError(
                f"{redact(self.target)} was not saved: the ranks are at different positions of the run, or have different parts to save "
                f"({found}). Call save_state at the same point on every rank, with the same hooks."
            )

    def write(self) -> dict[str, Any]:
        options = self.options
        with self.full or nullcontext():
            reusable = self.destination.reusable(self.saver.last) if options.dedup else []
            self.written = write_parts(
                self.stage, self.snapshot, max_shard_size=options.shard_bytes, reusable=reusable, dedup=options.dedup, full=self.full
            )
        if not self.stage.common:  # other processes do not see files that hooks wrote here
            adopt_hook_files(self.stage, self.written.contribution.files)
        return self.written.contribution.to_dict()

    def commit(self, contributions: Sequence[RankContribution]) -> None:
        saver = self.saver
        if saver.writes:
            others = [contribution for contribution in contributions if contribution.rank != self.snapshot.rank]
            commit_manifest(self.stage, self.snapshot, self.written, others)
            saver.finish(self.destination, self.target, self.snapshot)
        saver.last = self.target

    # -- async saving -------------------------------------------------------------------------------------------------

    def write_async(self) -> None:
        state = self.saver.components.state
        report: dict[str, Any] = {}
        with self.cleanup:
            try:
                report = {"contribution": self.write()}
            except Exception as error:
                report = {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}
                raise
            finally:
                if not self.saver.writes and report:
                    state.runtime.store_flags.agree(f"{self.ticket}/{state.process_index}", strict_json.dump(report).decode())
            self.commit(self._await_contributions() if self.saver.writes else [])

    def _await_contributions(self) -> list[RankContribution]:
        """Wait for the reports of the other ranks and return them."""
        state = self.saver.components.state
        notes, deadline = state.runtime.store_flags, time.monotonic() + state.limits.timeout
        found = []
        for rank in range(state.num_processes):
            if rank == state.process_index:
                continue
            name = f"{self.ticket}/{rank}"
            if not notes.is_set(name, wait=max(0.0, deadline - time.monotonic())):
                raise CheckpointError(
                    f"{redact(self.target)} was not saved: rank {rank} did not finish writing its part within "
                    f"{state.limits.timeout:.0f} s (the timeout of collectives)"
                )
            report = strict_json.parse(notes.agree(name, "").encode(), f"the report of rank {rank}")
            notes.clear(name)
            if "error" in report:
                raise CheckpointError(f"{redact(self.target)} was not saved: rank {rank} raised {report['error']}")
            found.append(RankContribution.from_dict(report["contribution"]))
        return found
