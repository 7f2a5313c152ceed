"""Where checkpoints are: folders of this machine as they are, URLs through copies that are gone afterwards."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.checkpoint.store import is_url, local_path, redacted
from slipstream.cli.inspect.folder import Look, Survey, folder_of, look, survey
from slipstream.errors import CheckpointError, ConfigError

__all__ = ["distinct", "name_of", "one_checkpoint", "readable", "survey_of"]


def name_of(given: str) -> str:
    """An argument as it may be shown."""
    return redacted(given)


def distinct(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without those that name the same place once more, and these."""
    seen: set[str] = set()
    kept: list[str] = []
    again: list[str] = []
    for one in given:
        place = one.rstrip("/") if is_url(one) else os.path.realpath(os.path.expanduser(local_path(one)))
        (again if place in seen else kept).append(one)
        seen.add(place)
    return kept, again


def survey_of(given: str) -> Survey:
    """What lies at a path or URL."""
    if not is_url(given):
        return _local_survey(given)
    from slipstream.checkpoint.remote import list_numbered, read_remote_manifest

    shown, url = name_of(given), given.rstrip("/")
    numbered = list_numbered(url)
    if not numbered:
        try:
            found = Look(Path(shown), shown.rpartition("/")[2], read_remote_manifest(url), url=url)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        return Survey(shown, Path(shown), [found], single=True)
    found_here, others = [], []
    for _, place in numbered:
        name = place.rpartition("/")[2]
        try:
            found_here.append(Look(Path(name_of(place)), name, read_remote_manifest(place), url=place))
        except CheckpointError as error:
            others.append(Look(Path(name_of(place)), name, why=str(error), url=place))
    return Survey(shown, Path(shown), found_here, others)


def _local_survey(given: str) -> Survey:
    """A folder with nothing but `checkpoints` in it is that of a project: those are meant."""
    found = survey(given, folder_of(local_path(given)))
    if not found.single and not found.checkpoints and any(one.name == "checkpoints" for one in found.others):
        inner = survey(f"{given.rstrip('/')}/checkpoints", found.folder / "checkpoints")
        if not inner.single:
            return inner
    return found


@contextmanager
def readable(one: Look) -> Iterator[Look]:
    """The same checkpoint with files that can be opened: those behind a URL are copied for the time of the block."""
    if one.url is None:
        yield one
        return
    from slipstream.checkpoint.remote import fetch

    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        yield look(fetch(one.url, Path(folder, "copy")), one.name)


def one_checkpoint(given: str) -> Look:
    """The checkpoint at a path or URL; a folder around several is a `ConfigError` that names them."""
    found = survey_of(given)
    if found.single:
        if not found.checkpoints:
            raise CheckpointError(found.others[0].why)
        return found.checkpoints[0]
    shown = name_of(found.given)
    if not found.checkpoints:
        raise ConfigError(f"{look(found.folder).why[:1000]}.\nGive a folder that save_state made.")
    names = [one.name for one in found.checkpoints]
    raise ConfigError(
        f"{shown} holds {len(names)} checkpoints and is none itself.\n"
        f"Name one of them, such as {shown.rstrip('/')}/{names[-1]}; `slipstream checkpoint ls {shown}` lists them."
    )
