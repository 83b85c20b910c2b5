"""A thousand damaged checkpoints: a named error or the one before, never a crash, never a wrong value."""

from __future__ import annotations

import hashlib
import pathlib
import random
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.store.made import Made, make

from syncline.core.checkpoint.manifest import Manifest, SavedFile, SavedSlice, SavedTensor
from syncline.core.checkpoint.soundness import decode_manifest, slice_tensor
from syncline.core.layout import Parameter, arrange, place
from syncline.core.rule import Rule
from syncline.errors import StoreError
from syncline.store import checkpoints, weights
from syncline.store.folders import open_folder
from syncline.store.tensors import TensorReader, TensorWriter

#: So many in `make test`, and in `make proof`.
MANY = pytest.mark.parametrize("num", [150, pytest.param(1000, marks=pytest.mark.proof)])
FILES = ("server-0.safetensors", "server-1.safetensors", "worker-0.script.safetensors", "manifest.json")
Damage = Callable[[pathlib.Path, random.Random], None]


def flip(path: pathlib.Path, draw: random.Random) -> None:
    file = path / draw.choice(FILES)
    data = bytearray(file.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 8))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def cut(path: pathlib.Path, draw: random.Random) -> None:
    file = path / draw.choice(FILES)
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data))])


def lengthen(path: pathlib.Path, draw: random.Random) -> None:
    file = path / draw.choice(FILES)
    file.write_bytes(file.read_bytes() + draw.randbytes(draw.randrange(1, 100)))


def header_length(path: pathlib.Path, draw: random.Random) -> None:
    file = path / draw.choice(FILES[:3])
    length = draw.choice((0, 1, 2**63, 2**64 - 1, 10**8 + 1, draw.randrange(2**20)))
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])


def header_text(path: pathlib.Path, draw: random.Random) -> None:
    file = path / draw.choice(FILES[:3])
    data = bytearray(file.read_bytes())
    place = 8 + draw.randrange(int.from_bytes(data[:8], "little"))
    data[place] = draw.choice([c for c in b'0123456789{}[]",: ' if c != data[place]])
    file.write_bytes(data)


def remove(path: pathlib.Path, draw: random.Random) -> None:
    (path / draw.choice(FILES)).unlink()


def swap(path: pathlib.Path, draw: random.Random) -> None:
    one, two = draw.sample(FILES, 2)
    a, b = (path / one).read_bytes(), (path / two).read_bytes()
    (path / one).write_bytes(b)
    (path / two).write_bytes(a)


def from_before(path: pathlib.Path, draw: random.Random) -> None:
    """A file of the checkpoint before, of the same name."""
    name = draw.choice((*FILES[:2], FILES[3]))
    before = path.parent / "000001-step-10"
    shutil.copy(before / name, path / name)


DAMAGES: tuple[Damage, ...] = (flip, flip, cut, lengthen, header_length, header_text, remove, swap, from_before)


def values(path: pathlib.Path) -> dict[str, bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: data.tobytes() for name, (_, data) in weights.load(path).items()}


@pytest.fixture
def two(tmp_path: pathlib.Path) -> tuple[pathlib.Path, list[Made]]:
    folder = open_folder(tmp_path / "c")
    return tmp_path / "c", [make(folder, number) for number in (1, 2)]


@MANY
def test_every_damage_is_found_and_the_one_before_is_taken(two: tuple[pathlib.Path, list[Made]], num: int) -> None:
    path, (first, second) = two
    own = path / second.name
    whole = {name: (own / name).read_bytes() for name in FILES}
    for seed in range(num):
        draw = random.Random(seed)
        damage = draw.choice(DAMAGES)
        damage(own, draw)
        changed = [n for n, data in whole.items() if not (own / n).exists() or (own / n).read_bytes() != data]
        said: list[str] = []
        chosen = checkpoints.choose(open_folder(path), said.append)
        assert chosen is not None, (seed, damage)
        assert chosen.name == (first.name if changed else second.name), (seed, damage.__name__)
        # Weights need no script: they are the one's or the other's, never a mixture.
        assert values(path) in (first.values, second.values), (seed, damage.__name__)
        try:
            assert values(own) == second.values, (seed, damage.__name__)
        except StoreError as error:
            assert str(own) in str(error), (seed, damage.__name__)
        for name in changed:
            (own / name).unlink(missing_ok=True)
            (own / name).write_bytes(whole[name])


def changed_somewhere(value: Any, draw: random.Random) -> Any:
    """The same JSON with one thing in it another."""
    if isinstance(value, dict) and value:
        key = draw.choice(list(value))
        if draw.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: changed_somewhere(value[key], draw)}
    if isinstance(value, list) and value:
        place = draw.randrange(len(value))
        how = draw.random()
        if how < 0.1:
            return value[:place] + value[place + 1 :]
        if how < 0.2:
            return [*value, value[place]]
        return [*value[:place], changed_somewhere(value[place], draw), *value[place + 1 :]]
    if isinstance(value, bool) or value is None:
        return draw.choice((0, "x", [], 2**70))
    if isinstance(value, int):
        return draw.choice((value + 1, value - 1, -1, 0, 2**31, 2**63, 2**70, value * 2, 10**30))
    return draw.choice(("", "x", "../../x", "slice-0", "float64", "server-1.safetensors", None, 7, "\0"))


@MANY
def test_manifests_that_lie_with_a_right_digest(two: tuple[pathlib.Path, list[Made]], num: int) -> None:
    """Whoever writes a manifest can write its digest too: what it says is still checked, and nothing is trusted."""
    path, (_, second) = two
    own = path / second.name
    plain = msgspec.json.decode(msgspec.json.encode(second.manifest))
    refused = 0
    for seed in range(num):
        draw = random.Random(seed)
        text = msgspec.json.encode(changed_somewhere(plain, draw)) + b"\n"
        (own / "manifest.json").write_bytes(text + hashlib.sha256(text).hexdigest().encode() + b"\n")
        try:
            found = values(own)
        except StoreError:
            refused += 1
            continue
        # Another name or shape of the same bytes is another checkpoint, not a damaged one.
        assert set(found.values()) <= set(second.values.values()), seed
    assert refused > num // 2


@pytest.mark.parametrize("text", [b"", b"{}", b"[" * 100_000, b"{" * 100_000, b'{"format":1}', b"\xff\xfe", b"null"])
def test_what_is_no_manifest_at_all(two: tuple[pathlib.Path, list[Made]], text: bytes) -> None:
    path, (first, second) = two
    text += b"\n"
    file = path / second.name / "manifest.json"
    file.write_bytes(text + hashlib.sha256(text).hexdigest().encode() + b"\n")
    assert values(path) == first.values
    with pytest.raises(StoreError, match="is damaged"):
        checkpoints.read_manifest(open_folder(path / second.name))


def test_a_newer_format_says_who_wrote_it(two: tuple[pathlib.Path, list[Made]]) -> None:
    path, (_, second) = two
    text = b'{"format": 99, "syncline": "7.1", "what": ["nobody", "knows"]}\n'
    file = path / second.name / "manifest.json"
    file.write_bytes(text + hashlib.sha256(text).hexdigest().encode() + b"\n")
    with pytest.raises(StoreError, match=r"written by syncline 7\.1 in format 99.*update syncline"):
        checkpoints.read_manifest(open_folder(path / second.name))


def test_a_header_that_says_the_same_in_other_bytes_is_damaged_too(two: tuple[pathlib.Path, list[Made]]) -> None:
    path, (first, second) = two
    padded = 0
    for name in FILES[:3]:
        file = path / second.name / name
        data = bytearray(file.read_bytes())
        last = 7 + int.from_bytes(data[:8], "little")
        if data[last] == ord(" "):
            padded += 1
            data[last] = ord("\n")
            file.write_bytes(data)
    assert padded
    said: list[str] = []
    chosen = checkpoints.choose(open_folder(path), said.append)
    assert chosen is not None and chosen.name == first.name and "header" in said[0]


def test_an_old_checkpoint_under_a_newer_name_is_not_the_newest(two: tuple[pathlib.Path, list[Made]]) -> None:
    path, (first, second) = two
    shutil.copytree(path / first.name, path / "000009-step-90")
    said: list[str] = []
    chosen = checkpoints.choose(open_folder(path), said.append)
    assert chosen is not None and chosen.name == second.name and f"that of {first.name}" in said[0]


def test_slices_that_name_each_others_tensors_are_refused(two: tuple[pathlib.Path, list[Made]]) -> None:
    """Two of the same size in the same file: only their names tell them apart."""
    _, (_, second) = two
    shapes = {(file.name, t.name): (t.dtype, t.shape) for file in second.manifest.files for t in file.tensors}
    slices = list(second.manifest.slices)
    pairs = [(a, b) for a in range(len(slices)) for b in range(a) if slices[a].file == slices[b].file]
    same = [p for p in pairs if len({shapes[slices[k].file, slices[k].tensor] for k in p}) == 1]
    assert same
    for a, b in same:
        changed = list(slices)
        changed[a] = msgspec.structs.replace(slices[a], tensor=slices[b].tensor)
        changed[b] = msgspec.structs.replace(slices[b], tensor=slices[a].tensor)
        text = msgspec.json.encode(msgspec.structs.replace(second.manifest, slices=tuple(changed)))
        with pytest.raises(StoreError, match="its tensor is missing"):
            decode_manifest(text, "here")


def test_a_state_that_is_smaller_than_its_piece_is_refused(two: tuple[pathlib.Path, list[Made]]) -> None:
    """Two rules of the same checkpoint, one that keeps more: torch's kernels would write beyond what is there."""
    _, (_, second) = two
    rules = (Rule("Adafactor", lr=0.1).spec,)
    segments = [msgspec.structs.replace(second.manifest.segments[0], rules=rules), *second.manifest.segments[1:]]
    text = msgspec.json.encode(msgspec.structs.replace(second.manifest, segments=tuple(segments)))
    with pytest.raises(StoreError, match="cannot be"):
        decode_manifest(text, "here")


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/x.safetensors", "a/b.safetensors", "..", "a\n.safetensors", "manifest.json", "begun.json"],
)
def test_no_name_in_a_manifest_leads_anywhere_else(two: tuple[pathlib.Path, list[Made]], name: str) -> None:
    path, (_, second) = two
    file = msgspec.structs.replace(second.manifest.files[0], name=name)
    files = (file, *second.manifest.files[1:])
    slices = tuple(
        msgspec.structs.replace(one, file=name) if one.file == second.manifest.files[0].name else one
        for one in second.manifest.slices
    )
    script = second.manifest.scripts[0]
    odd = msgspec.structs.replace(script, file=msgspec.structs.replace(script.file, name=name))
    for facts in ({"files": files, "slices": slices}, {"scripts": (odd,)}):
        text = msgspec.json.encode(msgspec.structs.replace(second.manifest, **facts))
        with pytest.raises(StoreError, match="cannot be named"):
            decode_manifest(text, "here")
    with pytest.raises(StoreError, match="cannot be named"):
        TensorWriter(open_folder(path), name, [("a", "uint8", (1,))])
    with pytest.raises(StoreError, match="cannot be named"):
        TensorReader(open_folder(path), file)


def test_no_memory_is_taken_for_what_a_manifest_only_claims(tmp_path: pathlib.Path) -> None:
    """A thousand bytes tell of terabytes: the files are looked at first."""
    parameter = Parameter("w", "float32", (1 << 40,))
    segment = arrange([parameter], [Rule("Adam", lr=0.1)], "mean", index=0, ordinal=0, first_parameter=0)
    segment, _ = place(segment, ["server-0"], {}, 1 << 42, 0)
    end, tensors = 0, []
    for part in segment.slices:
        shape, begin, end = (part.num_bytes // 4,), end, end + part.num_bytes
        tensors.append(SavedTensor(slice_tensor(part.id), "float32", shape, begin, end, "0" * 32))
    file = SavedFile("server-0.safetensors", end + 100, "0" * 32, tuple(tensors))
    slices = tuple(SavedSlice(part.id, file.name, slice_tensor(part.id), 1) for part in segment.slices)
    manifest = Manifest(
        name="000001-step-1",
        number=1,
        lineage="a",
        job="j",
        step=1,
        segments=(segment,),
        files=(file,),
        slices=slices,
    )
    own = checkpoints.begin(open_folder(tmp_path), 1, 1, "a")
    checkpoints.write_manifest(own, manifest)
    own.write(file.name, bytes(100))
    for use in (lambda: weights.load(tmp_path), lambda: weights.export(tmp_path, tmp_path / "x.safetensors")):
        with pytest.raises(StoreError, match="has 100 bytes"):
            use()
    with TensorReader(own, file) as reader:
        for read in (reader.read, reader.verify):
            with pytest.raises(StoreError, match="has 100 bytes"):
                read(tensors[0].name)
