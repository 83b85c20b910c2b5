"""Images, histograms and texts are made small, whatever a script gives; what is none of them is named."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest

from syncline.core.media import (
    MOST_CHARACTERS,
    MOST_MEDIA_BYTES,
    Histogram,
    Image,
    MediaItem,
    Text,
    check_item,
    counts_of,
    size_of_png,
    thinned,
)
from syncline.errors import ConfigError


def pixels_of(png: bytes) -> np.ndarray:
    """Reads a PNG by the standard, with no code of ours: chunks, their sums, lines without a filter."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    place, parts = 8, {}
    while place < len(png):
        (size,), kind = struct.unpack(">I", png[place : place + 4]), png[place + 4 : place + 8]
        data = png[place + 8 : place + 8 + size]
        (check,) = struct.unpack(">I", png[place + 8 + size : place + 12 + size])
        assert check == zlib.crc32(kind + data)
        parts[kind] = data
        place += 12 + size
    width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", parts[b"IHDR"])
    assert depth == 8 and rest == [0, 0, 0]
    channels = {0: 1, 2: 3, 6: 4}[colour]
    lines = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, channels)


def test_pixels_come_back() -> None:
    whole = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    assert (pixels_of(Image(whole).content("x")) == whole).all()
    assert (pixels_of(Image(np.moveaxis(whole, 2, 0)).content("x")) == whole).all(), "channels first"
    grey = pixels_of(Image(np.array([[0.0, 0.5, 1.0], [-3.0, 7.0, np.nan]])).content("x"))
    assert grey[:, :, 0].tolist() == [[0, 128, 255], [0, 255, 0]]
    assert pixels_of(Image(np.eye(2, dtype=bool)).content("x"))[:, :, 0].tolist() == [[255, 0], [0, 255]]
    assert pixels_of(Image(np.full((2, 2), -5, np.int64)).content("x")).max() == 0


@pytest.mark.parametrize("shape", [(257, 10), (3000, 2000, 3), (1, 100_000), (256, 256, 4), (5, 5000, 1)])
def test_large_images_are_made_smaller(shape: tuple[int, ...]) -> None:
    """Noise does not compress: the worst case."""
    png = Image(np.random.default_rng(1).integers(0, 256, shape, np.uint8)).content("x")
    assert len(png) <= MOST_MEDIA_BYTES and size_of_png(png) is not None
    height, width, _ = pixels_of(png).shape
    assert max(height, width) <= 256
    if min(shape[:2]) > 256:
        assert width / height == pytest.approx(shape[1] / shape[0], rel=0.05)
    assert not check_item(MediaItem("x", "image", 1, png))


def test_a_smaller_image_looks_the_same() -> None:
    half = np.zeros((1024, 1024), np.uint8)
    half[:, 512:] = 200
    small = pixels_of(Image(half).content("x"))[:, :, 0]
    assert small.shape == (256, 256) and (small[:, :128] == 0).all() and (small[:, 128:] == 200).all()


def test_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3).requires_grad_()
    assert counts_of(Histogram(tensor).content("x")).sum == 15
    assert size_of_png(Image(torch.rand(3, 8, 9)).content("x")) == (9, 8, 3)


def test_a_histogram_counts_every_value() -> None:
    values = np.random.default_rng(2).normal(3.0, 2.0, (100, 100))
    found = counts_of(Histogram(values).content("x"))
    assert sum(found.counts) == found.num == 10_000 and len(found.edges) == len(found.counts) + 1
    assert (found.low, found.high) == (values.min(), values.max()) == (found.edges[0], found.edges[-1])
    assert found.sum / found.num == pytest.approx(values.mean()) and found.sum_squares == pytest.approx(
        (values**2).sum()
    )


@pytest.mark.parametrize(
    "values",
    [
        [], [5.0], [5, 5, 5], [np.nan, np.inf], [1e308, -1e308], [1e300, np.nextafter(1e300, np.inf)], [True, False],
        [1.0, np.nextafter(1.0, 2.0)], [-0.0], [2**63 - 1, -(2**63)],
    ],
)  # fmt: skip
def test_strange_values_have_a_histogram_too(values: list[Any]) -> None:
    """It is JSON: no infinite number may be in it."""
    content = Histogram(values).content("x")
    found = counts_of(content)
    finite = np.isfinite(np.array(values, np.float64)).sum()
    assert found.num == finite == sum(found.counts) and found.num_not_finite == len(values) - finite
    assert found.edges == sorted(found.edges) and b"null" not in content
    assert not check_item(MediaItem("x", "histogram", 1, content))


def test_of_a_huge_layer_values_are_sampled() -> None:
    found = counts_of(Histogram(np.arange(3 << 20, dtype=np.float32)).content("x"))
    assert 1 << 19 < found.num <= 1 << 20 and found.high > 3_100_000


def test_a_long_text_is_cut() -> None:
    assert Text("ü").content("x") == "ü".encode()
    assert Text("\ud800").content("x") == b"?", "half a pair of surrogates"
    long = Text("ü" * 50_000).content("x").decode()
    assert len(long) == MOST_CHARACTERS and long.endswith("…")


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (Image(np.zeros((2, 2, 7))), r"x is an image of shape \(2, 2, 7\): it must be"),
        (Image(np.zeros((0, 4))), r"x is an image of shape \(0, 4\)"),
        (Image(3.0), r"x is an image of shape \(\)"),
        (Image("a.png"), "x cannot be an image: its values are <U5, not numbers"),
        (Image(None), "x cannot be an image: its values are object"),
        (Histogram([1, "a"]), "x cannot be a histogram: its values are <U"),
        (Histogram([[1], [1, 2]]), "x cannot be a histogram: .*inhomogeneous"),
        (Histogram(np.array([1j])), "complex128, not numbers"),
        (Text(b"bytes"), "x is a text of type bytes: it must be a str"),  # type: ignore[arg-type]
    ],
)
def test_what_is_none_is_named(one: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        one.content("x")


def test_items_from_outside_are_checked() -> None:
    counts = msgspec.json.encode({"edges": [0.0, 1.0], "counts": [1, 2]})
    wrong = [
        MediaItem("x", "video", 1, b""),
        MediaItem("x", "text", 1, bytes(MOST_MEDIA_BYTES + 1)),
        MediaItem("", "text", 1, b""),
        MediaItem("x" * 201, "text", 1, b""),
        MediaItem("x", "image", 1, b"<svg onload=alert(1)>"),
        MediaItem("x", "image", 1, Image(np.zeros((2, 2))).content("x")[:30]),
        MediaItem("x", "histogram", 1, counts),
        MediaItem("x", "histogram", 1, b"{}"),
    ]
    assert all(check_item(item) for item in wrong)


def test_thinning_keeps_the_newest_and_spreads_the_rest() -> None:
    numbers = list(range(9))
    assert [n for n in numbers if n not in thinned(numbers)] == [0, 2, 4, 6, 8]
    assert thinned([3]) == [] and thinned([3, 4]) == [3] and thinned([]) == []
