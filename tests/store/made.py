"""Small checkpoints, made as a job makes them: placed slices, rules' state, a script."""

from __future__ import annotations

import dataclasses
import hashlib

import msgspec
import numpy as np

from syncline.core.checkpoint.manifest import Manifest, SavedScript, SavedSlice, SavedState
from syncline.core.checkpoint.soundness import checkpoint_name, slice_tensor, state_tensor
from syncline.core.layout import ITEM_BYTES, Parameter, Segment, arrange, place
from syncline.core.rule import Rule
from syncline.store import checkpoints
from syncline.store.folders import Folder
from syncline.store.tensors import TensorWriter

MODEL = (
    Parameter("embed.weight", "float32", (40, 8)),  # over several slices
    Parameter("fc.weight", "bfloat16", (3, 7)),
    Parameter("fc.bias", "float32", (5,)),
    Parameter("empty", "float32", (0, 3)),
    Parameter("scale", "float64", ()),
)
BUFFERS = (Parameter("bn.count", "int64", ()), Parameter("bn.mask", "bool", (9,)))


@dataclasses.dataclass(frozen=True)
class Made:
    """A checkpoint, and what is in it."""

    name: str
    manifest: Manifest
    digest: str
    values: dict[str, bytes]  # of every parameter
    averages: dict[str, bytes]


def values_of(parameters: tuple[Parameter, ...], seed: int) -> dict[str, bytes]:
    """Some bytes for each parameter, others for every seed."""
    found = {}
    for parameter in parameters:
        draw = np.random.default_rng([seed, *hashlib.sha256(parameter.name.encode()).digest()[:4]])
        data = draw.integers(0, 2 if parameter.dtype == "bool" else 60, parameter.num_bytes, np.uint8)
        found[parameter.name] = data.tobytes()
    return found


def segments_of(servers: int = 2, slice_bytes: int = 256) -> tuple[list[Segment], dict[int, str]]:
    """The segments of a model and its buffers; and which server has which slice."""
    names = [f"server-{i}" for i in range(servers)]
    made, where = [], {}
    for index, (parameters, rule) in enumerate([(MODEL, Rule("Adam", lr=0.1)), (BUFFERS, Rule("Assign"))]):
        first = sum(len(segment.parameters) for segment in made)
        segment = arrange(parameters, [rule], "mean", index=index, ordinal=index, first_parameter=first)
        segment, replica_sets = place(segment, names, {}, slice_bytes, sum(len(one.slices) for one in made))
        made.append(segment)
        where.update(
            {part.id: replica_set.primary for part, replica_set in zip(segment.slices, replica_sets, strict=True)}
        )
    return made, where


def flat(segment: Segment, values: dict[str, bytes]) -> bytes:
    memory = bytearray(segment.num_bytes)
    for parameter, offset in zip(segment.parameters, segment.offsets, strict=True):
        memory[offset : offset + parameter.num_bytes] = values[parameter.name]
    return bytes(memory)


def make(
    folder: Folder,
    number: int = 1,
    *,
    seed: int | None = None,
    lineage: str = "a",
    kind: str = "whole",
    **facts: object,
) -> Made:
    """A checkpoint in this folder."""
    seed = number if seed is None else seed
    segments, where = segments_of()
    name = checkpoint_name(number, number * 10)
    # Workers' scripts may be there already.
    is_there = name in folder.list()
    own = folder.join(name) if is_there else checkpoints.begin(folder, number, number * 10, lineage)
    values, averages = values_of(MODEL + BUFFERS, seed), values_of(MODEL + BUFFERS, seed + 1000)
    files, slices = [], []
    for server in sorted(set(where.values())):
        file, saved = write_server(
            own, server, [k for k, v in where.items() if v == server], segments, values, averages
        )
        files.append(file)
        slices += saved
    with_script = TensorWriter(own, "worker-0.script.safetensors", [("torch", "uint8", (16,))])
    with_script.write("torch", bytes(range(16)))
    manifest = Manifest(
        name=name,
        number=number,
        lineage=lineage,
        job="j",
        step=number * 10,
        syncline="0.1.0",
        kind=kind,
        segments=tuple(segments),
        files=tuple(files),
        slices=tuple(slices),
        scripts=(SavedScript("worker-0", 3, with_script.finish()),),
    )
    manifest = msgspec.structs.replace(manifest, **facts)  # type: ignore[arg-type]
    return Made(name, manifest, checkpoints.write_manifest(own, manifest), values, averages)


def write_server(folder, server, ids, segments, values, averages):  # type: ignore[no-untyped-def]
    """The file of one server, with a state of one number and one of the parameter's shape for each piece."""
    parts = {part.id: (segment, part) for segment in segments for part in segment.slices}
    content: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    saved = []
    for number in ids:
        segment, part = parts[number]
        data = flat(segment, values)[part.offset : part.offset + part.num_bytes]
        other = flat(segment, averages)[part.offset : part.offset + part.num_bytes]
        content[slice_tensor(number)] = (part.dtype, (part.num_bytes // ITEM_BYTES[part.dtype],), data)
        states = []
        for index, piece in enumerate(segment.pieces(part)):
            size = piece.num_items * ITEM_BYTES[part.dtype]
            kept = {
                "step": ("float32", (), np.float32(7).tobytes()),
                "syncline.average": (part.dtype, (piece.num_items,), other[piece.offset : piece.offset + size]),
            }
            for key, tensor in kept.items():
                content[state_tensor(number, index, key)] = tensor
                states.append(SavedState(index, key, state_tensor(number, index, key)))
        saved.append(
            SavedSlice(number, f"{server}.safetensors", slice_tensor(number), 4, (("worker-0", 1, 3),), tuple(states))
        )
    writer = TensorWriter(folder, f"{server}.safetensors", [(n, d, s) for n, (d, s, _) in content.items()])
    for tensor, (_, _, data) in content.items():
        writer.write(tensor, data)
    return writer.finish(), saved
