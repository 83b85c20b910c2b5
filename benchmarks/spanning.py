"""Rows about steps between hosts, which are network namespaces: ring and servers, with codecs and without."""

from __future__ import annotations

import msgspec

from benchmarks.match import play
from benchmarks.namespaces import SpannedJobSide, SpannedProcessSide, wire
from benchmarks.row import Effort, Reach, Row, Samples, Unit
from benchmarks.switch import Meter, Switch, switch
from benchmarks.task import Task
from benchmarks.words import size_in_words

_RING = ("--exchange", "ring")
_UNCOUNTED = 1  # operations at the beginning of a turn: their bytes travel too


def ring_net(name: str, num_bytes: int, *, rate: str, reach: Reach) -> Row:
    """A step of a ring of two, beside gloo's all-reduce over the same wire and the same rule."""

    def measure(effort: Effort) -> Samples:
        with wire(rate) as hosts:
            ours = SpannedJobSide(Task(kind="push_pull", num_bytes=num_bytes), hosts, options=_RING)
            return play(
                ours, SpannedProcessSide("peers", Task(kind="all_reduce", num_bytes=num_bytes), hosts), effort
            )

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} step of a ring, SGD, 2 ranks, TLS between two namespaces at {rate}",
        reference="gloo all-reduce between the same two, in the clear, and a fused SGD step in each",
        reach=reach,
        measure=measure,
    )


def _play(ours: SpannedJobSide, reference: SpannedJobSide, effort: Effort, unit: Unit, hosts: Switch) -> Samples:
    """In seconds, or in the bytes that all hosts have sent meanwhile."""
    if unit == "seconds":
        return play(ours, reference, effort)
    meter = Meter(hosts)

    def read(num_operations: int) -> float:
        return meter.read(num_operations + _UNCOUNTED)

    return play(ours, reference, effort, gauges={"ours": read, "reference": read})


def ring_codec(name: str, num_bytes: int, codec: str, *, rate: str, reach: Reach, unit: Unit = "bytes") -> Row:
    """What a codec makes of the bytes on the wire, or of the time, of a ring of two."""

    def measure(effort: Effort) -> Samples:
        task = Task(kind="push_pull", num_bytes=num_bytes, is_random=True, num_uncounted=_UNCOUNTED)
        with switch(2, rate) as hosts:
            ours = SpannedJobSide(task, hosts, options=(*_RING, "--codec", codec))
            plain = SpannedJobSide(task, hosts, options=_RING, side="reference")
            return _play(ours, plain, effort, unit, hosts)

    what = "sent by both" if unit == "bytes" else "time"
    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} step of a ring, 2 ranks, namespaces at {rate}, --codec {codec}: {what}",
        reference="the same without a codec",
        reach=reach,
        measure=measure,
        unit=unit,
    )


def ring_hosts(name: str, num_bytes: int, *, each: int, rate: str, unit: Unit) -> Row:
    """Several workers on each of two hosts, beside a process group of the same, whose ranks gloo takes as they
    come."""

    def measure(effort: Effort) -> Samples:
        task = Task(kind="push_pull", num_bytes=num_bytes, num_uncounted=_UNCOUNTED)
        with switch(2, rate) as hosts:
            ours = SpannedJobSide(task, hosts, options=_RING, each=each)
            options = (*_RING, "--sums", "gloo", "--trust-network")
            gloo = SpannedJobSide(task, hosts, options=options, side="reference", each=each)
            return _play(ours, gloo, effort, unit, hosts)

    what = "sent by both hosts" if unit == "bytes" else "time"
    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} step of a ring, SGD, 2 hosts with {each} workers each at {rate}: {what}",
        reference="the same with --sums gloo, in the clear",
        reach=Reach("printed"),
        measure=measure,
        unit=unit,
    )


def ring_early(name: str, *, each: int, sums: str = "ours", is_stretched: bool = False) -> Row:
    """Gradients that leave while backward goes on, beside gradients that leave at the step. `is_stretched`: wire and
    backward are four times as slow, as if cores were four times as fast: busy cores then say less."""
    rate, milliseconds = ("250mbit", 1200) if is_stretched else ("1gbit", 300)

    def measure(effort: Effort) -> Samples:
        task = Task(kind="train", model=f"slow-{milliseconds}", num_threads=1)
        options = (*_RING, "--sums", sums, *(("--trust-network",) if sums != "ours" else ()))
        with switch(2, rate) as hosts:
            ours = SpannedJobSide(task, hosts, options=options, each=each)
            late = msgspec.structs.replace(task, overlap=False)
            return play(ours, SpannedJobSide(late, hosts, options=options, side="reference", each=each), effort)

    workers = "a worker" if each == 1 else f"{each} workers"
    model = f"24 MiB, backward sleeps {milliseconds} ms"
    return Row(
        name=name,
        what=f"{model}, SGD, ring, 2 hosts with {workers} each at {rate}, --sums {sums}",
        reference="the same with overlap=False",
        reach=Reach("printed"),
        measure=measure,
    )


def ring_beside_servers(name: str, num_bytes: int, *, workers: int, rate: str) -> Row:
    """One worker a host: the ring, beside as many servers, one on each host."""

    def measure(effort: Effort) -> Samples:
        task = Task(kind="push_pull", num_bytes=num_bytes)
        with switch(workers, rate) as hosts:
            servers = SpannedJobSide(task, hosts, options=("-s", str(workers)), side="reference")
            return play(SpannedJobSide(task, hosts, options=_RING), servers, effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} step of a ring, SGD, {workers} hosts with a worker each at {rate}",
        reference=f"the same with {workers} servers, one on each host",
        reach=Reach("printed"),
        measure=measure,
    )
