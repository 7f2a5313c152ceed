"""Look into folders of torch.distributed.checkpoint without torch: which there are at a path, and whether they are whole.

`find_dcp_parts` names the folder itself, or those that Accelerate's FSDP checkpoints keep for each model and optimizer. `find_dcp_problems`
reads every byte: the table of contents must be right, shards must cover their tensors, and every file of torch.save in them must have the
checksums that torch wrote. Safetensors files have none; of those, headers and sizes are checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from slipstream.checkpoint.dcp_metadata import (
    DcpChunk,
    DcpMetadata,
    DcpTensor,
    FileSpan,
    find_shard,
    is_dcp_folder,
    read_dcp_metadata,
    read_shard_header,
)
from slipstream.checkpoint.manifest import FSDP_MODEL_NAME, MANIFEST, OPTIMIZER_NAME
from slipstream.checkpoint.pickle_records import disassemble
from slipstream.checkpoint.shard_layout import cover_box, whole_box
from slipstream.checkpoint.torch_archive import read_archive
from slipstream.errors import CheckpointError
from slipstream.files.paths import open_inside
from slipstream.files.reader import read_span

__all__ = ["dcp_bytes", "find_dcp_parts", "find_dcp_problems"]

_PART: Final = re.compile(rf"({FSDP_MODEL_NAME}|{OPTIMIZER_NAME})_(\d{{1,9}})", re.ASCII)


def find_dcp_parts(folder: Path) -> dict[str, Path]:
    """Return the folders of torch.distributed.checkpoint at a path, by what is in them; none if it is something else.

    >>> find_dcp_parts(Path("nowhere"))
    {}
    """
    if not folder.is_dir() or (folder / MANIFEST).exists():
        return {}
    if is_dcp_folder(folder):
        return {"state": folder}
    found = {name: match for name in sorted(os.listdir(folder)) if (match := _PART.fullmatch(name)) and is_dcp_folder(folder / name)}
    titles = {name: f"{'model' if match[1] == FSDP_MODEL_NAME else 'optimizer'} {int(match[2])}" for name, match in found.items()}
    return {title: folder / name for name, title in sorted(titles.items(), key=lambda item: (item[1].split()[0], int(item[1].split()[1])))}


def dcp_bytes(metadata: DcpMetadata) -> int:
    """Return how many bytes its files have."""
    return sum(os.lstat(metadata.folder / name).st_size for name in metadata.stored_files())


def find_dcp_problems(folder: Path, advance: Callable[[int], object] = lambda count: None) -> Iterator[str]:
    """Yield what is wrong with a folder, after reading every byte of it; `advance` is told how many at a time."""
    try:
        metadata = read_dcp_metadata(folder)
    except CheckpointError as error:
        yield str(error)
        return
    for name, tensor in metadata.tensors.items():
        try:
            list(cover_box([chunk.box for chunk in tensor.chunks], whole_box(tensor.shape)))
        except ValueError as error:
            yield f"{folder}: {name[:100]!r} cannot be assembled: {error}"
    checks = [
        (partial(_check_archive, folder, chunk.span) if chunk.archived else partial(_check_shard, folder, tensor, chunk), chunk.span.length)
        for tensor in metadata.tensors.values()
        for chunk in tensor.chunks
    ]
    checks += [(partial(_check_archive, folder, span), span.length) for span in metadata.values.values()]
    for check, length in checks:
        try:
            check()
        except CheckpointError as error:
            yield str(error)
        advance(length)


def _check_shard(folder: Path, tensor: DcpTensor, chunk: DcpChunk) -> None:
    """Raise if a shard is not in the safetensors file that it should be in."""
    where = str(folder / chunk.span.file)
    find_shard(read_shard_header(folder, chunk.span.file, chunk.span.start), tensor, chunk, where)


def _check_archive(folder: Path, span: FileSpan) -> None:
    """Raise if a file of torch.save in a file is damaged."""
    where = str(folder / span.file)
    fd = open_inside(folder, span.file)
    try:
        archive = read_archive(read_span(fd, span.start, span.end, where=where), where)
    finally:
        os.close(fd)
    disassemble(bytes(archive.entry("data.pkl")), where)
