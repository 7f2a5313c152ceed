"""Read the zip archives that `torch.save` writes, with strict checks of the central directory.

Entries must lie inside the file, not overlap, have unique names and be stored without compression, so that nothing read from them is
larger than the file; checksums are verified if the file has them. Anything else is an error that names the file. Nothing is unpacked, and
torch is not imported.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.errors import CheckpointError

__all__ = ["Archive", "LegacyFormatError", "read_archive"]

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")
_CENTRAL_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LONGEST_COMMENT = 0xFFFF
_FULL_32 = 0xFFFFFFFF
_EXTRA_64 = 1
_ENCRYPTED = 0x1


class LegacyFormatError(CheckpointError):
    """A file that is not a zip archive: written before torch 1.6, or by another program."""


@dataclass(frozen=True)
class Archive:
    """The spans of the entries in a file; names are without the folder that all entries share."""

    data: memoryview
    spans: Mapping[str, tuple[int, int]]
    where: str

    def entry(self, name: str) -> memoryview:
        """Return the bytes of one entry, not copied."""
        if name not in self.spans:
            raise CheckpointError(f"{self.where} has no entry {name!r}: it is not a torch.save file, or incomplete")
        start, end = self.spans[name]
        return self.data[start:end]


@dataclass(frozen=True)
class _CentralEntry:
    """One entry of the central directory."""

    name: str
    header: int
    size: int
    checksum: int


def read_archive(data: memoryview, where: str) -> Archive:
    """Return the archive in these bytes; `where` is its path, for messages.

    >>> read_archive(memoryview(b"hello"), "notes.bin")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    slipstream.checkpoint.torch_archive.LegacyFormatError: notes.bin is not a zip archive, as torch.save writes since torch ...
    """
    if bytes(data[:2]) != b"PK":
        raise LegacyFormatError(f"{where} is not a zip archive, as torch.save writes since torch 1.6: it begins with {bytes(data[:8])!r}")
    try:
        begin, end, count = _table(data, where)
        listed = _list(data, begin, end, count, where)
        return Archive(data, _spans(data, listed, begin, where), where)
    except struct.error as problem:
        raise _broken(where, f"its central directory is cut off ({problem})") from None


def _broken(where: str, why: str) -> CheckpointError:
    return CheckpointError(f"{where} is damaged or malicious: {why}. Use another copy of the checkpoint.")


def _table(data: memoryview, where: str) -> tuple[int, int, int]:
    """Return start, end and number of entries of the central directory."""
    tail = bytes(data[-(_END.size + _LONGEST_COMMENT) :])
    at = len(data) - len(tail) + tail.rfind(b"PK\5\6")
    if b"PK\5\6" not in tail:
        raise _broken(where, "its end is missing, where the central directory is")
    _, _, _, here, count, size, begin, comment = _END.unpack_from(data, at)
    if at + _END.size + comment != len(data) or here != count:
        raise _broken(where, "the record at its end does not match the file")
    locator = at - _LOCATOR_64.size
    if locator >= 0 and bytes(data[locator : locator + 4]) == b"PK\6\7":  # torch always writes the zip64 records
        at = _LOCATOR_64.unpack_from(data, locator)[2]
        if at + _END_64.size > locator:
            raise _broken(where, "a record before its end is missing")
        signature, _, _, _, _, _, here, count, size, begin = _END_64.unpack_from(data, at)
        if signature != b"PK\6\6" or here != count:
            raise _broken(where, "a record before its end is wrong")
    if begin + size != at or count * _CENTRAL_ENTRY.size > size:
        raise _broken(where, f"its central directory cannot have {count} entries in {size} bytes at {begin}")
    return begin, begin + size, count


def _list(data: memoryview, at: int, end: int, count: int, where: str) -> list[_CentralEntry]:
    found = []
    for _ in range(count):
        if at + _CENTRAL_ENTRY.size > end:
            raise _broken(where, "its central directory is cut off")
        signature, _, _, flags, method, _, _, checksum, packed, size, *lengths, _, _, _, header = _CENTRAL_ENTRY.unpack_from(data, at)
        name_at, extra_at = at + _CENTRAL_ENTRY.size, at + _CENTRAL_ENTRY.size + lengths[0]
        at = extra_at + lengths[1] + lengths[2]
        if signature != b"PK\1\2" or at > end:
            raise _broken(where, "its central directory is cut off")
        name = _name(bytes(data[name_at:extra_at]), where)
        size, packed, header = _zip64_sizes(bytes(data[extra_at : extra_at + lengths[1]]), size, packed, header, name, where)
        if method != 0 or packed != size or flags & _ENCRYPTED:
            raise CheckpointError(
                f"{where}: its entry {name!r} is compressed or encrypted ({packed} bytes for {size}), which torch.save never does. "
                "It is not unpacked, because its real size is unknown; load and save it again with torch if you trust it."
            )
        found.append(_CentralEntry(name, header, size, checksum))
    if at != end:
        raise _broken(where, "its central directory has more entries than it counts")
    return found


def _name(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _broken(where, f"the name {raw[:80]!r} is not UTF-8") from None


def _zip64_sizes(extra: bytes, size: int, packed: int, header: int, name: str, where: str) -> tuple[int, int, int]:
    """Return the three numbers; those beyond 32 bits are in an extra field, in this order."""
    values = [size, packed, header]
    missing = [place for place, value in enumerate(values) if value == _FULL_32]
    if not missing:
        return size, packed, header
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _EXTRA_64 and length >= 8 * len(missing) and at + 4 + length <= len(extra):
            for number, place in enumerate(missing):
                values[place] = struct.unpack_from("<Q", extra, at + 4 + 8 * number)[0]
            return values[0], values[1], values[2]
        at += 4 + length
    raise _broken(where, f"the size of its entry {name!r} is missing")


def _spans(data: memoryview, listed: list[_CentralEntry], end_of_data: int, where: str) -> dict[str, tuple[int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    root = listed[0].name.split("/")[0] + "/" if listed else "/"
    free_from = 0
    for item in sorted(listed, key=lambda entry: entry.header):
        if item.header < free_from or item.header + _LOCAL.size > end_of_data:
            raise _broken(where, f"its entry {item.name!r} overlaps another, or lies outside")
        signature, _, _, _, _, _, _, _, _, name_length, extra_length = _LOCAL.unpack_from(data, item.header)
        name_at = item.header + _LOCAL.size
        start = name_at + name_length + extra_length
        free_from = start + item.size
        if signature != b"PK\3\4" or free_from > end_of_data or bytes(data[name_at : name_at + name_length]) != item.name.encode():
            raise _broken(where, f"its entry {item.name!r} ({item.size} bytes) is not where the central directory says")
        if item.checksum and zlib.crc32(data[start:free_from]) != item.checksum:  # all are 0 if torch was told to omit them
            raise _broken(where, f"the checksum of its entry {item.name!r} does not match")
        name = item.name.removeprefix(root)
        if name == item.name or name in spans:
            raise _broken(where, f"its entry {item.name!r} occurs twice, or is not in the folder {root!r} with the others")
        spans[name] = (start, free_from)
    return spans
