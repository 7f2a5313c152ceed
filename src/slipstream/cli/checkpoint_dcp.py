"""`slipstream checkpoint` for folders of torch.distributed.checkpoint, and Accelerate's FSDP checkpoints that hold such folders.

What is shown comes from the table of contents; tensors are read by `verify` and `diff` alone. Only `diff` imports torch, to read tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.checkpoint.dcp_inspect import dcp_bytes, find_dcp_parts
from slipstream.checkpoint.dcp_metadata import DTYPE_CODES, DTYPE_SIZES, DcpTensor, read_dcp_metadata
from slipstream.cli.checkpoint_view import content_line, tensor_lines
from slipstream.cli.text_format import format_count
from slipstream.devices.memory import convert_bytes
from slipstream.errors import CheckpointError, ConfigError
from slipstream.files.object_store import is_url, local_path
from slipstream.observability.report.text_charts import escape_control

__all__ = ["compare_dcp", "dcp_lines", "dcp_parts", "describe_dcp", "require_same_kind"]

_MANY = 24


def dcp_parts(given: str) -> dict[str, Path]:
    """Return the folders of torch.distributed.checkpoint at a place, by what is in them; none if it is something else."""
    return {} if is_url(given) else find_dcp_parts(Path(local_path(given)).expanduser().absolute())


def describe_dcp(given: str, parts: Mapping[str, Path], *, tensors: bool) -> dict[str, Any]:
    """Return all that the tables of contents say, as plain data; with `tensors`, every tensor too."""
    described = [{"title": title, **_describe_part(folder, tensors)} for title, folder in parts.items()]
    return {
        "folder": given,
        "format": "torch.distributed.checkpoint",
        "size": sum(part.get("size", 0) for part in described),
        "parts": described,
        "problems": [part["problem"] for part in described if "problem" in part],
    }


def _describe_part(folder: Path, tensors: bool) -> dict[str, Any]:
    try:
        metadata = read_dcp_metadata(folder)
    except CheckpointError as error:
        return {"folder": str(folder), "problem": str(error)}
    dtypes: dict[str, int] = {}
    for tensor in metadata.tensors.values():
        dtypes[_code(tensor)] = dtypes.get(_code(tensor), 0) + math.prod(tensor.shape)
    listed = [
        {"name": name, "dtype": _code(tensor), "shape": list(tensor.shape), "file": ", ".join(chunk.span.file for chunk in tensor.chunks)}
        for name, tensor in metadata.tensors.items()
    ]
    return {
        "folder": str(folder),
        "size": dcp_bytes(metadata),
        "files": metadata.stored_files(),
        "tensors": len(metadata.tensors),
        "elements": sum(dtypes.values()),
        "bytes": sum(tensor.size for tensor in metadata.tensors.values()),
        "dtypes": dtypes,
        "keys": list(dict.fromkeys(str(path[0]) for path in metadata.paths.values() if len(path) > 1)),
        "values": list(metadata.values),
        **({"tensor_list": listed} if tensors else {}),
    }


def _code(tensor: DcpTensor) -> str:
    return DTYPE_CODES.get(tensor.dtype, tensor.dtype)


def dcp_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for a terminal."""
    yield f"{escape_control(data['folder'])}: {convert_bytes(data['size'])}, written by torch.distributed.checkpoint"
    for part in data["parts"]:
        yield f"{part['title']} ({escape_control(part['folder'])}): {content_line(part)}"
        if "problem" in part:
            continue
        yield f"  {format_count(len(part['files']), 'file')}, and {format_count(len(part['values']), 'value')} beside the tensors"
        if part["keys"]:
            shown = ", ".join(map(escape_control, part["keys"][:_MANY]))
            yield f"  keys: {shown}{', ...' if len(part['keys']) > _MANY else ''}"
        yield from tensor_lines(part)


def require_same_kind(first: str, second: str, parts: tuple[Mapping[str, Path], Mapping[str, Path]]) -> None:
    """Raise if only one of two places is a folder of torch.distributed.checkpoint."""
    if bool(parts[0]) != bool(parts[1]):
        theirs, other = (first, second) if parts[0] else (second, first)
        raise ConfigError(
            f"{theirs} was written by torch.distributed.checkpoint, and {other} was not: their parts have other names.\n"
            "Compare two of a kind; `slipstream checkpoint export-dcp` makes such a folder of a checkpoint."
        )


def compare_dcp(first: Mapping[str, Path], second: Mapping[str, Path]) -> Iterator[Any]:
    """Yield the parts of two such checkpoints as `DiffSection`s, each with what is different."""
    from slipstream.checkpoint.dcp_reader import DcpFolder, open_dcp
    from slipstream.checkpoint.inspect import READ_SIZE
    from slipstream.checkpoint.tensor_bytes import tensor_bytes
    from slipstream.cli.checkpoint_diff import DiffSection, ValueDifference, compare_tensors

    def chunks(folder: DcpFolder, name: str) -> Iterator[bytes]:
        data = tensor_bytes(folder.tensors[name])
        for start in range(0, len(data), READ_SIZE):
            yield bytes(data[start : start + READ_SIZE])

    def text(folder: DcpFolder, name: str) -> str | None:
        tensor = folder.metadata.tensors.get(name)
        if tensor is not None:
            return f"{_code(tensor)} {list(tensor.shape)}"
        return repr(folder.value(name)) if name in folder.metadata.values else None

    for title in dict.fromkeys([*first, *second]):
        section = DiffSection(title)
        if title not in first or title not in second:
            names = [str(parts[title]) if title in parts else None for parts in (first, second)]
            section.apart.append(ValueDifference("folder", names[0], names[1]))
            yield section
            continue
        left, right = open_dcp(first[title]), open_dcp(second[title])
        for name in dict.fromkeys([*left.metadata.paths, *right.metadata.paths]):
            told = text(left, name), text(right, name)
            if told[0] != told[1]:
                section.apart.append(ValueDifference(name, *told))
            elif name in left.tensors:
                section.compared += 1
                dtype = left.metadata.tensors[name].dtype
                code = DTYPE_CODES.get(dtype) or f"U{8 * min(8, DTYPE_SIZES[dtype])}"
                difference = compare_tensors(code, chunks(left, name), chunks(right, name))
                if difference.changed:
                    section.apart.append(ValueDifference(name, *told, difference))
        yield section
