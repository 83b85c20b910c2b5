"""Which files of a working folder are sent to other hosts, and what the other side takes."""

from __future__ import annotations

import io
import pathlib
import tarfile

import pytest

from syncline.errors import ConfigError
from syncline.launch import code_transfer
from syncline.launch.code_transfer import collect, receive, send


def make(folder: pathlib.Path, *paths: str, text: str = "x") -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def paths(folder: pathlib.Path, *left_out: str) -> list[str]:
    return [file.path for file in collect(folder, [folder / name for name in left_out])]


def test_code_is_sent_and_runs_environments_and_caches_are_not(tmp_path: pathlib.Path) -> None:
    make(tmp_path, "train.py", "model/net.py", "model/__pycache__/net.pyc", ".git/config", "runs/a/job.json")
    make(tmp_path, "saves/step-1/manifest.json", "own-env/pyvenv.cfg", "own-env/lib/x.py", "notes/runs/kept.txt")
    assert paths(tmp_path, "runs", "saves") == ["train.py", "model/net.py", "notes/runs/kept.txt"]
    make(tmp_path, "data/big.bin", "a.pt", "model/b.pt")
    make(tmp_path, code_transfer.IGNORED, text="# not needed there\ndata/\n*.pt\nnotes/runs\n\n")
    assert paths(tmp_path, "runs", "saves") == [code_transfer.IGNORED, "train.py", "model/net.py"]


def test_a_folder_that_is_too_large_names_what_is(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_transfer, "MOST_BYTES", 3 << 20)
    make(tmp_path, "train.py", "model/net.py")
    make(tmp_path, "data/a.bin", "data/b.bin", text="x" * (2 << 20))
    with pytest.raises(ConfigError, match=r"has 4 MiB in 4 files \(data/ 4 MiB, .*at most 3 MiB .*\.synclineignore"):
        collect(tmp_path, [])
    make(tmp_path, code_transfer.IGNORED, text="b.bin")
    assert len(collect(tmp_path, [])) == 4
    monkeypatch.setattr(code_transfer, "MOST_FILES", 3)
    with pytest.raises(ConfigError, match="in 4 files"):
        collect(tmp_path, [])


def test_files_arrive_with_their_modes_and_replace_older_ones(tmp_path: pathlib.Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    make(here, "train.py", "model/net.py", "gone.py")
    (here / "train.py").chmod(0o750)
    make(there, "train.py", "stays.py", text="old")
    files = collect(here, [])
    (here / "gone.py").unlink()
    stream = io.BytesIO()
    send(here, files, stream)
    stream.seek(0)
    assert receive(there, stream) == 2
    assert sorted(path.name for path in there.rglob("*") if path.is_file()) == ["net.py", "stays.py", "train.py"]
    assert (there / "train.py").read_text() == "x" and (there / "train.py").stat().st_mode & 0o777 == 0o750


def stream_of(*members: tarfile.TarInfo) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|") as out:
        for about in members:
            out.addfile(about, io.BytesIO(b"y" * about.size))
    stream.seek(0)
    return stream


def entry(name: str, size: int = 1, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    about = tarfile.TarInfo(name)
    about.size, about.type, about.linkname = size, kind, "/etc" if kind != tarfile.REGTYPE else ""
    return about


@pytest.mark.parametrize(
    "about", [entry("../out"), entry("/out"), entry("a/../../out"), entry("link", 0, tarfile.SYMTYPE)]
)
def test_what_does_not_belong_below_the_folder_is_refused(tmp_path: pathlib.Path, about: tarfile.TarInfo) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    with pytest.raises(ConfigError, match="is not a file of the working folder"):
        receive(folder, stream_of(about))
    assert list(tmp_path.rglob("*")) == [folder]


def test_the_other_side_bounds_what_it_takes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_transfer, "MOST_BYTES", 10)
    with pytest.raises(ConfigError, match="are sent"):
        receive(tmp_path, stream_of(entry("a", 6), entry("b", 6)))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("what", ["folder", "file outside of the working folder"])
def test_what_lies_elsewhere_is_not_sent_and_not_left_out_in_silence(tmp_path: pathlib.Path, what: str) -> None:
    folder, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "key").write_text("secret")
    (folder / "link").symlink_to(elsewhere if what == "folder" else elsewhere / "key")
    with pytest.raises(ConfigError, match=f"--sync-code: link is a link to a {what}.*synclineignore"):
        collect(folder, [])
    (folder / ".synclineignore").write_text("link\n")
    assert [file.path for file in collect(folder, [])] == [".synclineignore"]
