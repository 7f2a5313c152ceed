"""Images of any kind as uint8 arrays of (height, width, channels), and as PNG files, with numpy only.

Accepted are PIL images, matplotlib figures, and arrays or tensors of (H, W), (H, W, C) or (C, H, W) with 1 to 4 channels. Where both ends
could be the channels, a tensor has them first and an array last. Integers are 0 to 255, booleans black and white, floats 0 to 1 (0 to 255
if one exceeds 2); values outside are clipped. Several images are a list, or an array with one more leading axis.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
from numpy.typing import NDArray

from slipstream.observability.trackers.values import RejectedValuesError, describe_type

__all__ = ["ImageArray", "ImagesByName", "to_image", "to_images", "encode_png", "to_three_channels"]

ImageArray = NDArray[numpy.uint8]
"""Height, width, channels (1 to 4)."""

_CHANNELS = (1, 2, 3, 4)
_COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
"""Channels of a picture, as PNG numbers them."""


def to_images(given: Any) -> list[ImageArray]:
    """Return one picture, a list of them, or a batch, as a list.

    >>> [image.shape for image in to_images(numpy.zeros((5, 8, 9, 3)))], len(to_images([numpy.zeros((4, 4))] * 2))
    ([(8, 9, 3), (8, 9, 3), (8, 9, 3), (8, 9, 3), (8, 9, 3)], 2)
    """
    if isinstance(given, list | tuple):
        return [to_image(image) for image in given]
    if len(getattr(given, "shape", ())) == 4:
        return [to_image(image) for image in given]
    return [to_image(given)]


def to_image(given: Any) -> ImageArray:
    """Return one picture as bytes.

    >>> to_image(numpy.ones((2, 2), dtype=bool)).tolist()
    [[[255], [255]], [[255], [255]]]
    """
    if hasattr(given, "getbands") and hasattr(given, "convert"):
        return _to_uint8(_from_pillow(given), first=False, what=given)
    if hasattr(given, "savefig"):
        return _from_figure(given)
    if hasattr(given, "detach"):
        tensor = given.detach().cpu()
        values = tensor.float() if tensor.dtype.is_floating_point else tensor
        return _to_uint8(values.numpy(), first=True, what=given)
    if hasattr(given, "__array__"):
        return _to_uint8(numpy.asarray(given), first=False, what=given)
    raise TypeError(
        f"{describe_type(given)} is not a picture: give one of PIL, a figure of matplotlib, or an array or tensor of (H, W), (H, W, C) "
        "or (C, H, W), or a list of those"
    )


def _from_pillow(image: Any) -> NDArray[Any]:
    known = {"L": "L", "1": "L", "LA": "LA", "RGBA": "RGBA", "PA": "RGBA", "RGB": "RGB"}
    mode = "RGBA" if image.mode == "P" and "transparency" in image.info else known.get(image.mode, "RGB")
    return numpy.asarray(image.convert(mode))


def _from_figure(figure: Any) -> ImageArray:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="rgba", dpi=figure.dpi)
    width, height = (int(side) for side in figure.bbox.bounds[2:])
    return numpy.frombuffer(buffer.getvalue(), dtype=numpy.uint8).reshape(height, width, 4)


def _to_uint8(values: NDArray[Any], *, first: bool, what: Any) -> ImageArray:
    """Return an array of some layout and type as a picture; `first` says where the channels are if both ends could be."""
    if values.ndim == 2:
        values = values[:, :, None]
    if values.ndim != 3 or not {values.shape[0], values.shape[2]} & set(_CHANNELS) or values.size == 0:
        shape = tuple(values.shape)
        raise TypeError(f"a {type(what).__name__} of {shape} is not a picture: give (H, W), (H, W, C) or (C, H, W) of 1 to 4 channels")
    ends = values.shape[0] in _CHANNELS, values.shape[2] in _CHANNELS
    if ends == (True, False) or (all(ends) and first and what is not None and len(what.shape) == 3):
        values = values.transpose(1, 2, 0)
    if values.dtype == numpy.bool_:
        values = values.astype(numpy.uint8) * 255
    if numpy.issubdtype(values.dtype, numpy.integer):
        whole: ImageArray = numpy.clip(values, 0, 255).astype(numpy.uint8, copy=False)
        return whole
    if not numpy.issubdtype(values.dtype, numpy.floating):
        raise TypeError(f"a picture of {values.dtype} is not supported: give integers, floats or booleans")
    values = numpy.nan_to_num(values.astype(numpy.float32), nan=0.0, posinf=1.0, neginf=0.0)
    scale = 1.0 if values.max() > 2.0 else 255.0
    shown: ImageArray = numpy.clip(numpy.rint(values * scale), 0, 255).astype(numpy.uint8)
    return shown


class ImagesByName:
    """The images of one call by name, and the values that are not images; a tracker stores the former and then calls `refuse`.

    `read` returns the list of images of one name, for trackers that accept more than `to_images` does.

    >>> found = ImagesByName({"good": numpy.zeros((2, 2)), "bad": None})
    >>> list(found.made)
    ['good']
    >>> found.refuse()
    Traceback (most recent call last):
        ...
    slipstream.observability.trackers.values.RejectedValuesError: the picture bad is left out: None is not a picture: ...
    """

    def __init__(self, values: Mapping[str, Any], read: Callable[[Any], list[Any]] = to_images) -> None:
        self.made: dict[str, list[Any]] = {}
        self.wrong: dict[str, str] = {}
        for name, given in values.items():
            try:
                self.made[str(name)] = read(given)
            except TypeError as error:
                self.wrong[str(name)] = str(error)
            except Exception as error:  # one without data, or a figure that cannot draw itself; the others are stored
                self.wrong[str(name)] = f"{describe_type(given)} cannot be read as a picture ({type(error).__name__}: {error})"

    def numbered(self, separator: str) -> Iterator[tuple[str, Any]]:
        """Return each image with its name, followed by the separator and a number where the name has several."""
        for name, several in self.made.items():
            for number, image in enumerate(several):
                yield name if len(several) == 1 else f"{name}{separator}{number}", image

    def refuse(self) -> None:
        """Raise an error for values that are not images, if there are any."""
        if self.wrong:
            raise RejectedValuesError("picture", self.wrong)


def encode_png(image: ImageArray) -> bytes:
    """Return a picture as the content of a PNG file.

    >>> encode_png(to_image(numpy.zeros((2, 3, 3))))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    height, width, channels = image.shape
    rows = numpy.zeros((height, 1 + width * channels), dtype=numpy.uint8)  # each begins with a 0: no filter
    rows[:, 1:] = image.reshape(height, width * channels)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def to_three_channels(picture: Any) -> Any:
    """Return a grey picture with three channels, which every viewer supports; any other unchanged."""
    return picture.repeat(3, axis=2) if picture.shape[2] == 1 else picture
