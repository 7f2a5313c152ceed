"""Save state that is sharded over ranks: every rank takes part, and one that stays away is named.

    begin    the ranks meet; the writing rank has opened a stage and says which
    write    each rank writes what it holds into that stage, and the writing rank what all share
    agree    each reports what it wrote or its error; after an error nothing is committed and every rank raises
    commit   the writing rank commits and reports the outcome

With async saving the ranks meet once more when each has its snapshot. Then each writes on its own and leaves a flag in the rendezvous
store; the writing rank waits for all flags and commits. No background thread takes part in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from slipstream.checkpoint.capture import PiecesPart, Snapshot, capture_snapshot
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

if TYPE_CHECKING:
    from slipstream.checkpoint.saver import SaveOptions, Saver

__all__ = ["save_sharded"]

_LONGEST_ERROR: Final = 2000


def save_sharded(saver: Saver, output_dir: Any, options: SaveOptions) -> str:
    """Save, and return the path of the checkpoint. Every rank has to call it; when one returns, it is there, unless the save is async."""
    with ExitStack() as cleanup:
        save = _ShardedSave(saver, options, cleanup)
        save.agree_on_target(saver.run_and_agree("save_state", partial(save.begin, output_dir)))
        if options.async_save:
            save.check_positions(saver.run_and_agree("save_state", save.capture))
            save.cleanup = cleanup.pop_all()
            saver.background.start(f"the checkpoint {redact(save.target)}", save.write_async)
        else:
            reports = saver.run_and_agree("save_state", lambda: [save.capture(), save.write()])
            save.check_positions([position for position, _ in reports])
            saver.run_and_agree("save_state", lambda: save.commit([RankContribution.from_dict(report) for _, report in reports]))
    return save.target


@dataclass
class _ShardedSave:
    """One save, as one rank sees it. The methods are its steps; each returns what the other ranks are told."""

    saver: Saver
    options: SaveOptions
    cleanup: ExitStack
    """What gives the stage up, unless it is committed."""
    target: str = ""
    ticket: str | None = None
    """What names the stage that the writing rank has begun."""
    place: Destination = field(init=False)
    stage: Stage = field(init=False)
    snapshot: Snapshot = field(init=False)
    written: WrittenParts = field(init=False)

    def begin(self, output_dir: Any) -> list[Any]:
        saver = self.saver
        saver.background.wait()
        if saver.project.save_on_each_node:
            raise ConfigError(
                "ProjectConfiguration(save_on_each_node=True) with state that is sharded over processes: no machine has all of it. Leave "
                "it out, and save to a folder that all machines see, or to a URL"
            )
        self.target = saver.target(output_dir)
        self.place = open_destination(self.target, saver.disk)
        if saver.writes:
            self._enter(self.place.begin())
            self.ticket = self.stage.ticket
        return [self.target, self.ticket, saver.project.iteration]

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self.cleanup.callback(stage.abandon)  # does nothing once it is committed

    def agree_on_target(self, reports: list[Any]) -> None:
        """Take over the target, the ticket and the number of the rank that writes."""
        target, self.ticket, iteration = next(report for report in reports if report[1] is not None)
        if self.saver.folder is not None:  # the numbers of the writing rank count
            self.target, self.place = target, open_destination(target, self.saver.disk)
            self.saver.project.iteration = iteration + 1
        elif any(report[0] != target for report in reports):
            given = ", ".join(f"rank {rank}: {report[0]!r}" for rank, report in enumerate(reports))
            raise ConfigError(f"save_state was given different folders ({given}): state that is sharded over processes is one checkpoint")

    def capture(self) -> list[str]:
        """Take what this rank will write; hooks of the script run now."""
        saver = self.saver
        if not saver.writes:
            self._enter(self.place.join(str(self.ticket)))
        weights = saver.take_weights(str(self.stage.folder))
        pieces: list[PiecesPart] = []
        snapshot = capture_snapshot(saver.components, saver.history, saver.objects, weights, self.options.metric, pieces)
        if not saver.writes:
            snapshot = replace(snapshot, models=(), optimizers=(), training=None, objects=())
        self.snapshot = saver.arena.keep(snapshot) if self.options.async_save else snapshot
        return [snapshot.facts.stamp, *(part.base for part in snapshot.pieces)]

    def check_positions(self, positions: list[Any]) -> None:
        if any(position != positions[0] for position in positions):
            found = "; ".join(f"rank {rank}: {stamp} with {', '.join(held) or 'nothing'}" for rank, (stamp, *held) in enumerate(positions))
            raise CheckpointError(
                f"{redact(self.target)} was not saved: the ranks are at different places of the run, or have different things to save "
                f"({found}). Call save_state at the same place on every rank, with the same hooks."
            )

    def write(self) -> dict[str, Any]:
        options = self.options
        reusable = self.place.reusable(self.saver.last) if options.dedup else []
        self.written = write_parts(
            self.stage, self.snapshot, max_shard_size=options.shard_bytes, reusable=reusable, dedup=options.dedup
        )
        if not self.stage.common:  # files of hooks in this folder are seen by no other process
            adopt_hook_files(self.stage, self.written.contribution.files)
        return self.written.contribution.to_dict()

    def commit(self, contributions: Sequence[RankContribution]) -> None:
        saver = self.saver
        if saver.writes:
            others = [contribution for contribution in contributions if contribution.rank != self.snapshot.rank]
            commit_manifest(self.stage, self.snapshot, self.written, others)
            saver.finish(self.place, self.target, self.snapshot)
        saver.last = self.target

    # -- async saving -------------------------------------------------------------------------------------------------

    def write_async(self) -> None:
        state = self.saver.components.state
        report: dict[str, Any] = {}
        with self.cleanup:
            try:
                report = {"share": self.write()}
            except Exception as error:
                report = {"trouble": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]}
                raise
            finally:
                if not self.saver.writes and report:
                    state.runtime.notes.agree(f"{self.ticket}/{state.process_index}", strict_json.dump(report).decode())
            self.commit(self._await_contributions() if self.saver.writes else [])

    def _await_contributions(self) -> list[RankContribution]:
        """Return what the other ranks have written, once all of them have."""
        state = self.saver.components.state
        notes, deadline = state.runtime.notes, time.monotonic() + state.limits.timeout
        found = []
        for rank in range(state.num_processes):
            if rank == state.process_index:
                continue
            name = f"{self.ticket}/{rank}"
            if not notes.has(name, wait=max(0.0, deadline - time.monotonic())):
                raise CheckpointError(
                    f"{redact(self.target)} was not saved: rank {rank} did not come to the end of writing its part within "
                    f"{state.limits.timeout:.0f} s (the timeout of collectives)"
                )
            report = strict_json.parse(notes.agree(name, "").encode(), f"the note of rank {rank}")
            notes.take_back(name)
            if "trouble" in report:
                raise CheckpointError(f"{redact(self.target)} was not saved: rank {rank} raised {report['trouble']}")
            found.append(RankContribution.from_dict(report["share"]))
        return found
