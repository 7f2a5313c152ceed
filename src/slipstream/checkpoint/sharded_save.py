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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from slipstream.checkpoint.capture import PiecesPart, Snapshot, capture_snapshot
from slipstream.checkpoint.weights import parse_size
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
from slipstream.distributed.scatter import agree_or_raise
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files import strict_json
from slipstream.files.object_store import redact

if TYPE_CHECKING:
    from slipstream.checkpoint.saver import SaveOptions, Saver

__all__ = ["save_sharded"]

_Kept = TypeVar("_Kept")
_LONGEST_TROUBLE: Final = 2000


@dataclass
class _ShardedSave:
    """One save, as one rank sees it."""

    saver: Saver
    options: SaveOptions
    target: str
    place: Destination
    undo: ExitStack
    stage: Stage | None = None
    """What the checkpoint is put together in."""

    def enter(self, stage: Stage) -> Stage:
        self.stage = stage
        self.undo.callback(stage.abandon)  # nothing, once it is committed
        return stage

    @property
    def open_stage(self) -> Stage:
        assert self.stage is not None
        return self.stage


def save_sharded(saver: Saver, output_dir: Any, options: SaveOptions) -> str:
    """Saves; the path of the checkpoint. Every rank has to call it; when one returns, it is there, unless it is written behind."""
    with ExitStack() as undo:
        save, told = _run_and_agree(saver, partial(_begin, saver, output_dir, options, undo), _announce)
        ticket = _agree_on_target(save, told)
        if options.behind:
            snapshot, told = _run_and_agree(saver, partial(_take, save, ticket), _position)
            _agree_on_position(save, told)
            save.undo = undo.pop_all()
            saver.background.start(f"the checkpoint {redact(save.target)}", partial(_write_async, save, snapshot, ticket))
        else:
            (snapshot, draft), told = _run_and_agree(saver, partial(_write, save, ticket), _report_written)
            _agree_on_position(save, [position for position, _ in told])
            _run_and_agree(saver, partial(_commit, save, snapshot, draft, [RankContribution.of(share) for _, share in told]), _nothing)
    return save.target


def _run_and_agree(saver: Saver, step: Callable[[], _Kept], tells: Callable[[_Kept], Any]) -> tuple[_Kept, list[Any]]:
    """Takes a step, and tells the other ranks about it: its result, and what all ranks tell. If one raises, all of them do."""
    kept: list[_Kept] = []
    outcome: Any
    try:
        kept.append(step())
        outcome = tells(kept[0])
    except Exception as error:  # every rank has to hear of it, and raises
        outcome = error
    told = agree_or_raise(saver.parts.state.channel(), saver.parts.state.limits, outcome, operation="save_state")
    return kept[0], told


def _nothing(kept: Any) -> None:
    """All that is to be told is that it went well."""


# -- the steps --------------------------------------------------------------------------------------------------------


def _begin(saver: Saver, output_dir: Any, options: SaveOptions, undo: ExitStack) -> _ShardedSave:
    saver.background.wait()
    if saver.project.save_on_each_node:
        raise ConfigError(
            "ProjectConfiguration(save_on_each_node=True) with state that is sharded over processes: no machine has all of it. Leave it "
            "out, and save to a folder that all machines see, or to a URL"
        )
    target = saver.target(output_dir)
    save = _ShardedSave(saver, options, target, open_destination(target, saver.disk), undo)
    if saver.writes:
        save.enter(save.place.begin())
    return save


def _announce(save: _ShardedSave) -> Any:
    return [save.target, None if save.stage is None else save.stage.ticket, save.saver.project.iteration]


def _agree_on_target(save: _ShardedSave, told: list[Any]) -> str:
    """The ticket of the stage that the writing rank has opened."""
    target, ticket, iteration = next(entry for entry in told if entry[1] is not None)
    if save.saver.folder is not None:  # the numbers of the writing rank count
        save.target, save.place = target, open_destination(target, save.saver.disk)
        save.saver.project.iteration = iteration + 1
    elif any(entry[0] != target for entry in told):
        given = ", ".join(f"rank {rank}: {entry[0]!r}" for rank, entry in enumerate(told))
        raise ConfigError(f"save_state was given different folders ({given}): state that is sharded over processes is one checkpoint")
    agreed: str = ticket
    return agreed


def _take(save: _ShardedSave, ticket: str) -> Snapshot:
    """What this rank will write; hooks of the script run now."""
    saver = save.saver
    stage = save.stage or save.enter(save.place.join(ticket))
    weights = saver.weights(str(stage.folder))
    pieces: list[PiecesPart] = []
    snapshot = capture_snapshot(saver.parts, saver.history, saver.objects, weights, save.options.metric, pieces)
    if not saver.writes:
        snapshot = replace(snapshot, models=(), optimizers=(), training=None, objects=())
    return saver.arena.keep(snapshot) if save.options.behind else snapshot


def _position(snapshot: Snapshot) -> Any:
    return [snapshot.facts.stamp, *(part.base for part in snapshot.pieces)]


def _agree_on_position(save: _ShardedSave, told: list[Any]) -> None:
    if any(entry != told[0] for entry in told):
        found = "; ".join(f"rank {rank}: {entry[0]} with {', '.join(entry[1:]) or 'nothing'}" for rank, entry in enumerate(told))
        raise CheckpointError(
            f"{redact(save.target)} was not saved: the ranks are at different places of the run, or have different things to save "
            f"({found}). Call save_state at the same place on every rank, with the same hooks."
        )


def _write(save: _ShardedSave, ticket: str) -> tuple[Snapshot, WrittenParts]:
    snapshot = _take(save, ticket)
    return snapshot, _compose(save, snapshot)


def _report_written(kept: tuple[Snapshot, WrittenParts]) -> Any:
    return [_position(kept[0]), kept[1].share.told()]


def _compose(save: _ShardedSave, snapshot: Snapshot) -> WrittenParts:
    stage, options = save.open_stage, save.options
    largest = None if options.max_shard_size is None else parse_size(options.max_shard_size)
    reusable = save.place.earlier(save.saver.last) if options.dedup else []
    draft = write_parts(stage, snapshot, max_shard_size=largest, reusable=reusable, dedup=options.dedup)
    if not stage.common:  # what hooks have written here is seen by nobody else
        adopt_hook_files(stage, draft.share.files)
    return draft


def _commit(save: _ShardedSave, snapshot: Snapshot, draft: WrittenParts, shares: list[RankContribution]) -> None:
    saver, place = save.saver, save.place
    if saver.writes:
        commit_manifest(save.open_stage, snapshot, draft, [share for share in shares if share.rank != draft.share.rank])
        place.collect(snapshot.facts.stamp)
        if saver.folder is not None:
            place.mark_latest()
            place.rotate(saver.keep)
    saver.last = save.target


# -- behind the training ----------------------------------------------------------------------------------------------


def _write_async(save: _ShardedSave, snapshot: Snapshot, ticket: str) -> None:
    state = save.saver.parts.state
    note = f"{ticket}/{state.process_index}"
    told: dict[str, Any] = {}
    with save.undo:
        try:
            draft = _compose(save, snapshot)
            told = {"share": draft.share.told()}
        except Exception as error:
            told = {"trouble": f"{type(error).__name__}: {error}"[:_LONGEST_TROUBLE]}
            raise
        finally:
            if not save.saver.writes and told:
                state.runtime.notes.agree(note, strict_json.dump(told).decode())
        _commit(save, snapshot, draft, _await_contributions(save, ticket) if save.saver.writes else [])


def _await_contributions(save: _ShardedSave, ticket: str) -> list[RankContribution]:
    """What the other ranks have written, as they come to the end of it."""
    state = save.saver.parts.state
    notes, others = state.runtime.notes, [rank for rank in range(state.num_processes) if rank != state.process_index]
    deadline, found = time.monotonic() + state.limits.timeout, []
    for rank in others:
        name = f"{ticket}/{rank}"
        if not notes.has(name, wait=max(0.0, deadline - time.monotonic())):
            raise CheckpointError(
                f"{redact(save.target)} was not saved: rank {rank} did not come to the end of writing its part within "
                f"{state.limits.timeout:.0f} s (the timeout of collectives)"
            )
        told = strict_json.parse(notes.agree(name, "").encode(), f"the note of rank {rank}")
        notes.take_back(name)
        if "trouble" in told:
            raise CheckpointError(f"{redact(save.target)} was not saved: rank {rank} raised {told['trouble']}")
        found.append(RankContribution.of(told["share"]))
    return found
