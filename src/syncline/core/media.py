"""Images, histograms and texts that a script reports beside its metrics: small things to look at.

Pure. Each is made small where it is reported, so that what travels and what is kept is bounded: an image has at most
256 pixels a side, a histogram 64 bins, a text 10,000 characters.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from syncline.core.wire.message import Message
from syncline.errors import ConfigError

#: Different names that a job may report, and the bytes of one content.
MOST_MEDIA: Final = 200
MOST_MEDIA_BYTES: Final = 320 << 10
MOST_SIDE: Final = 256
MOST_BINS: Final = 64
MOST_CHARACTERS: Final = 10_000
KINDS: Final = ("image", "histogram", "text")
#: Values of a histogram beyond this are sampled, evenly spread: its cost stays the same for the largest layer.
MOST_VALUES: Final = 1 << 20

#: So that sums of squares stay finite.
_LARGEST: Final = 1e150

Values = npt.NDArray[Any]


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """One of them, as it travels and is kept."""

    name: str
    kind: str  #: of KINDS
    step: int
    content: bytes  #: image: PNG; histogram: BinCounts as JSON; text: UTF-8


class ReportedMedia(NamedTuple):
    """One of them, as a coordinator has it."""

    at: float  # wall clock
    member: str  # that reported it
    item: MediaItem


class GiveMedia(Message, frozen=True):
    """A worker's newest of each name. It is not answered: a lost one is replaced by the next."""

    items: list[MediaItem]


class BinCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many values lie between two edges. Moments are of the finite values."""

    edges: list[float]  #: one more than counts
    counts: list[int]
    num: int = 0
    num_not_finite: int = 0
    low: float = 0.0
    high: float = 0.0
    sum: float = 0.0
    sum_squares: float = 0.0


class Reportable(Protocol):
    """What `job.report` takes besides numbers."""

    kind: str

    def content(self, name: str) -> bytes:
        """Made small. Raises ConfigError that says `name`."""


class Image:
    """A picture for `job.report`: an array (height, width), or with 1, 3 or 4 channels, last or first.

    Integers are from 0 to 255, floating numbers and booleans from 0 to 1; what is beyond is cut off. A picture with
    more than 256 pixels a side is made smaller. PIL images and `numpy.asarray(figure.canvas.buffer_rgba())` of
    matplotlib are fine.
    """

    kind = "image"

    def __init__(self, pixels: Any) -> None:
        self._pixels = pixels

    def content(self, name: str) -> bytes:
        pixels = _array(name, "an image", self._pixels)
        if pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4) and pixels.shape[0] in (1, 3, 4):
            pixels = np.moveaxis(pixels, 0, 2)  # channels first, as torch has them
        if pixels.ndim not in (2, 3) or not pixels.size or (pixels.ndim == 3 and pixels.shape[2] not in (1, 3, 4)):
            raise ConfigError(
                f"job.report: {name} is an image of shape {pixels.shape}: it must be (height, width), or have 1, 3 "
                "or 4 channels"
            )
        small = _smaller(_bytes_of(pixels))
        while len(png := _png(small)) > MOST_MEDIA_BYTES:
            small = small[::2, ::2]
        return png


class Histogram:
    """A distribution for `job.report`: an array of numbers of any shape. It is kept as 64 counts.

    Of more than a million values, evenly spread ones are counted. NaN and infinite values are counted apart.
    """

    kind = "histogram"

    def __init__(self, values: Any) -> None:
        self._values = values

    def content(self, name: str) -> bytes:
        return msgspec.json.encode(_counted(_array(name, "a histogram", self._values).ravel()))


class Text:
    """Words for `job.report`, e.g. a sample of what a model writes. At most 10,000 characters are kept."""

    kind = "text"

    def __init__(self, text: str) -> None:
        self._text = text

    def content(self, name: str) -> bytes:
        if not isinstance(self._text, str):
            raise ConfigError(f"job.report: {name} is a text of type {type(self._text).__name__}: it must be a str")
        text = self._text if len(self._text) <= MOST_CHARACTERS else f"{self._text[: MOST_CHARACTERS - 1]}…"
        return text.encode("utf-8", "replace")


def check_item(item: MediaItem) -> str:
    """What is wrong with an item that came from outside; "" if nothing is."""
    if item.kind not in KINDS:
        return f"{item.kind[:20]!r} is no kind of media"
    if len(item.content) > MOST_MEDIA_BYTES or not 0 < len(item.name) <= 200:
        return f"{item.name[:50]!r} is too large"
    if item.kind == "image" and size_of_png(item.content) is None:
        return f"{item.name!r} is no PNG"
    if item.kind == "histogram":
        try:
            counts_of(item.content)
        except msgspec.MsgspecError as error:
            return f"{item.name!r} is no histogram: {error}"
    return ""


def counts_of(content: bytes) -> BinCounts:
    """The content of a histogram. Raises msgspec.MsgspecError."""
    found = msgspec.json.decode(content, type=BinCounts)
    if len(found.edges) != len(found.counts) + 1 or len(found.counts) > MOST_BINS:
        raise msgspec.ValidationError(f"{len(found.edges)} edges for {len(found.counts)} counts")
    return found


def thinned(numbers: Sequence[int]) -> list[int]:
    """Which of these, oldest first, go when there are too many: every second, never the newest."""
    return list(numbers[-2::-2])[::-1]


# -- arrays -----------------------------------------------------------------------------------------------


def _array(name: str, what: str, value: Any) -> Values:
    try:
        for step in ("detach", "cpu"):  # of tensors
            value = getattr(value, step)() if hasattr(value, step) else value
        if str(getattr(value, "dtype", "")) == "torch.bfloat16":
            value = value.float()  # which NumPy does not know
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"job.report: {name} cannot be {what}: {error}") from None
    if found.dtype.kind not in "buif":
        raise ConfigError(f"job.report: {name} cannot be {what}: its values are {found.dtype}, not numbers")
    return found


def _bytes_of(pixels: Values) -> npt.NDArray[np.uint8]:
    """Pixels as (height, width, channels) of 0 to 255; made smaller first, as that is less to convert."""
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    step = max(1, -(-max(pixels.shape[:2]) // (4 * MOST_SIDE)))
    pixels = pixels[::step, ::step]
    if pixels.dtype.kind in "fb":
        pixels = np.nan_to_num(pixels.astype(np.float32), nan=0.0, posinf=1.0, neginf=0.0) * 255.0 + 0.5
    return np.clip(pixels, 0, 255).astype(np.uint8)


def _smaller(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Means of squares of pixels, so that no side is longer than MOST_SIDE."""
    step = -(-max(pixels.shape[:2]) // MOST_SIDE)
    if step == 1:
        return pixels
    height, width = (max(step, side // step * step) for side in pixels.shape[:2])
    padded = np.pad(
        pixels, ((0, max(0, height - pixels.shape[0])), (0, max(0, width - pixels.shape[1])), (0, 0)), "edge"
    )
    squares = padded[:height, :width].reshape(height // step, step, width // step, step, pixels.shape[2])
    means: npt.NDArray[np.float64] = squares.mean((1, 3))
    return means.round().astype(np.uint8)


def _counted(values: Values) -> BinCounts:
    values = values[:: max(1, -(-values.size // MOST_VALUES))].astype(np.float64)
    finite = np.clip(values[np.isfinite(values)], -_LARGEST, _LARGEST)
    missing = int(values.size - finite.size)
    if not finite.size:
        return BinCounts(edges=[0.0, 1.0], counts=[0], num_not_finite=missing)
    low, high = float(finite.min()), float(finite.max())
    try:
        counts, edges = np.histogram(finite, MOST_BINS)
    except ValueError:  # they are so close that no number lies between two edges
        counts, edges = np.array([finite.size]), np.array([low, np.nextafter(high, np.inf)])
    return BinCounts(
        edges=edges.tolist(),
        counts=counts.tolist(),
        num=int(finite.size),
        num_not_finite=missing,
        low=low,
        high=high,
        sum=float(finite.sum()),
        sum_squares=float(np.square(finite).sum()),
    )


# -- PNG --------------------------------------------------------------------------------------------------

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_COLOURS: Final = {1: 0, 3: 2, 4: 6}  # channels -> what PNG calls them


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    height, width, channels = pixels.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 6)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def size_of_png(content: bytes) -> tuple[int, int, int] | None:
    """Width, height and channels; None if it is no PNG of ours."""
    if len(content) < 33 or content[:8] != _SIGNATURE or content[12:16] != b"IHDR":
        return None
    width, height, depth, colour = struct.unpack(">IIBB", content[16:26])
    channels = next((number for number, name in _COLOURS.items() if name == colour), 0)
    if depth != 8 or not channels or not (0 < width <= MOST_SIDE and 0 < height <= MOST_SIDE):
        return None
    return width, height, channels
