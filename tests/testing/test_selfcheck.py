"""The job behind `slipstream test`: passes where everything works, and fails, by rank, where something does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.distributed.state import PartialState
from slipstream.testing import selfcheck
from slipstream.testing.plugin import RankPools
from slipstream.testing.selfcheck import SelfCheckResult


@pytest.fixture
def compiler(tmp_path: Path) -> dict[str, str]:
    """torch.optim and DistributedDataParallel import torch's compiler, which sets this variable if nobody has."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}


def _run_all() -> list[SelfCheckResult]:
    state = PartialState(cpu=True)
    outcomes = selfcheck.run(state)
    state.destroy_process_group()
    return outcomes


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_check_passes(ranks: RankPools, size: int, compiler: dict[str, str]) -> None:
    """Every check passes here."""
    for outcomes in ranks(size).run(_run_all, timeout=60, environ=compiler):
        assert [outcome.name for outcome in outcomes if outcome.failed] == [], outcomes
        assert len(outcomes) == len(selfcheck.CHECKS)


def _with_a_failure_on_rank_one() -> list[SelfCheckResult]:
    def picky(state: PartialState) -> str:
        if state.process_index == 1:
            raise ValueError("no good")
        return "fine"

    state = PartialState(cpu=True)
    mine = selfcheck.run(state, [("picky", picky), ("reduce", dict(selfcheck.CHECKS)["reduce"])])
    joined = selfcheck._combine(state, mine)
    state.destroy_process_group()
    return joined


def test_failure_on_one_named_for_all(ranks: RankPools) -> None:
    """A failure on one process is a failure for all and is named."""
    first, second = ranks(2).run(_with_a_failure_on_rank_one)
    assert first[0].failed
    assert second[0].failed
    assert first[0].text == "rank 1: ValueError: no good"
    assert not first[1].failed


def _training_without_synchronisation() -> list[SelfCheckResult]:
    state = PartialState(cpu=True)
    honest = selfcheck._train

    def unsynchronised(state: PartialState, wrapper: object) -> object:
        return honest(state, (lambda model, device_ids: model) if wrapper is not None else None)

    selfcheck._train = unsynchronised  # type: ignore[assignment]
    try:
        return selfcheck.run(state, [("training", selfcheck._check_training)])
    finally:
        selfcheck._train = honest
        state.destroy_process_group()


def test_unsynchronised_training_found(ranks: RankPools, compiler: dict[str, str]) -> None:
    """A training that does not synchronise is found."""
    for outcomes in ranks(2).run(_training_without_synchronisation, timeout=60, environ=compiler):
        assert outcomes[0].failed
        assert "weights differ" in outcomes[0].text


def _silent_mismatch() -> list[SelfCheckResult]:
    state = PartialState(cpu=True)

    class Forgiving(PartialState):
        def gather(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
            return None

        def reduce(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
            return None

    outcomes = selfcheck.run(Forgiving(cpu=True), [("mistake", selfcheck._check_mismatch)])
    state.destroy_process_group()
    return outcomes


def test_silent_mistake_found(ranks: RankPools) -> None:
    """A mistake that raises nothing is found."""
    for outcomes in ranks(2).run(_silent_mismatch):
        assert outcomes[0].failed
        assert "no error was raised" in outcomes[0].text


def test_one_process_skips_mistake() -> None:
    """On one process the mistake is said not to apply."""
    state = PartialState(cpu=True)
    (outcome,) = selfcheck.run(state, [("mistake", selfcheck._check_mismatch)])
    assert outcome.text.startswith("not applicable")
