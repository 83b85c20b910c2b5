"""Rows about moving bytes: gradients up, parameters down, between processes of one host or of two."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.match import play
from benchmarks.namespaces import SERVER_ADDRESS, SpannedJobSide, inside, wire
from benchmarks.row import Effort, Reach, Row, Samples
from benchmarks.sides import JobSide, ProcessSide
from benchmarks.task import Task
from benchmarks.words import size_in_words

#: Bare references by their kind.
FLOORS = {
    "shared memory": "bare two-process shared-memory loop: signal, one in-place add, one copy out",
    "round trip": "bare Unix-socket round trip of two processes",
    "stream": "bare TCP echo of two processes, both directions streaming in 4 MiB pieces",
}


def _against_floor(ours: Task, floor: str, settings: dict[str, Any], effort: Effort) -> Samples:
    """As many bare pairs as there are workers, all at once."""
    pairs = settings.get("workers", 1)
    reference = ProcessSide("floors", Task(kind=floor, num_bytes=ours.num_bytes), processes=pairs)
    return play(JobSide(ours, **settings), reference, effort)


def push_pull(
    name: str, num_bytes: int, *, own_arrays: bool, floor: str, reach: Reach, transport: str = "shm"
) -> Row:
    """push_pull with one worker and one server on this host, SGD on the server, beside a bare loop."""
    source = "the caller's own arrays" if own_arrays else "gradients()"
    task = Task(kind="push_pull", num_bytes=num_bytes, own_arrays=own_arrays)
    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} push_pull, SGD, 1 worker 1 server, {transport}, from {source}",
        reference=FLOORS[floor],
        reach=reach,
        measure=partial(_against_floor, task, floor, {"transport": transport}),
    )


def beside(name: str, num_bytes: int, other_bytes: int, *, workers: int, reach: Reach) -> Row:
    """push_pull of a few parameters of a large model, beside the same where there are no others."""

    def measure(effort: Effort) -> Samples:
        ours, reference = (
            JobSide(
                Task(kind="push_pull", num_bytes=num_bytes, other_bytes=others),
                workers=count,
                transport="shm",
                side=side,
            )
            for side, others, count in (("ours", other_bytes, workers), ("reference", 0, 1))
        )
        return play(ours, reference, effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} push_pull beside {size_in_words(other_bytes)} that are not pushed, SGD, "
        f"sync, {workers} worker{'s' if workers > 1 else ''} 1 server, shm",
        reference="the same of ours with 1 worker and no other parameters",
        reach=reach,
        measure=measure,
    )


def crowd(
    name: str, num_bytes: int, *, workers: int, floor: str, transport: str, reach: Reach, num_cores: int = 0
) -> Row:
    """push_pull of many workers with one server in `async`, beside as many bare pairs."""
    settings = {"workers": workers, "policy": "async", "transport": transport}
    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} async, {workers} workers 1 server, {transport}, from gradients()",
        reference=f"{workers} pairs at once: {FLOORS[floor]}",
        reach=reach,
        measure=partial(_against_floor, Task(kind="push_pull", num_bytes=num_bytes), floor, settings),
        num_cores=num_cores,
    )


def tls(name: str, num_bytes: int, *, reach: Reach) -> Row:
    """push_pull between two hosts, which are network namespaces, beside a bare echo between the same two."""

    def measure(effort: Effort) -> Samples:
        with wire() as hosts:
            ours = SpannedJobSide(Task(kind="push_pull", num_bytes=num_bytes, num_bystanders=1), hosts)
            partner = inside(hosts.server)
            echo = Task(kind="stream", num_bytes=num_bytes, address=SERVER_ADDRESS, prefix=partner)
            return play(ours, ProcessSide("tls", echo, prefix=inside(hosts.worker)), effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} push_pull, SGD, 1 worker 1 server, TLS between two network namespaces, "
        "from gradients()",
        reference="bare TLS 1.3 echo of two processes between the same two, both directions streaming",
        reach=reach,
        measure=measure,
    )


def sync(name: str, num_bytes: int, *, workers: int, reach: Reach) -> Row:
    """A round of several workers on one host, beside gloo."""

    def measure(effort: Effort) -> Samples:
        ours = JobSide(Task(kind="push_pull", num_bytes=num_bytes), workers=workers, transport="shm")
        gloo = ProcessSide("peers", Task(kind="all_reduce", num_bytes=num_bytes), processes=workers)
        return play(ours, gloo, effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} sync, {workers} workers 1 server, from gradients()",
        reference=f"gloo all-reduce plus local fused SGD step, {workers} ranks",
        reach=reach,
        measure=measure,
    )


def finite_check(name: str, num_bytes: int, *, workers: int) -> Row:
    """What the look for NaN and Inf costs: a round of gradients that lie in place, beside the same without it."""

    def measure(effort: Effort) -> Samples:
        task = Task(kind="push_pull", num_bytes=num_bytes)
        ours, reference = (
            JobSide(task, workers=workers, check_finite=looks, transport="shm", side=side)
            for side, looks in (("ours", True), ("reference", False))
        )
        return play(ours, reference, effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} sync, {workers} workers 1 server, from gradients(), checked for NaN",
        reference="the same of ours with --no-check-finite",
        reach=Reach("printed"),
        measure=measure,
    )


def sync_scaling(
    name: str, num_bytes: int, *, large: tuple[int, int] = (8, 4), small: tuple[int, int] = (2, 1), reach: Reach
) -> Row:
    """A round of many (workers, servers), beside a round of few."""

    def measure(effort: Effort) -> Samples:
        task = Task(kind="push_pull", num_bytes=num_bytes)
        ours, reference = (
            JobSide(task, workers=workers, servers=servers, transport="shm", side=side)
            for side, (workers, servers) in (("ours", large), ("reference", small))
        )
        return play(ours, reference, effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} sync, {large[0]} workers {large[1]} servers, from gradients(): "
        "at most linear in the workers",
        reference=f"the same of ours with {small[0]} workers {small[1]} server",
        reach=reach,
        measure=measure,
    )


def adam(name: str, num_bytes: int, *, reach: Reach) -> Row:
    """Adam on the server, beside Adam here."""

    def measure(effort: Effort) -> Samples:
        ours = JobSide(Task(kind="push_pull", num_bytes=num_bytes, own_arrays=True, rule="Adam"), transport="shm")
        return play(ours, ProcessSide("peers", Task(kind="fused_adam", num_bytes=num_bytes)), effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} Adam on the server, 1 worker, from the caller's own arrays",
        reference="one fused Adam step in the same process plus two copies",
        reach=reach,
        measure=measure,
    )


def replicas(name: str, num_bytes: int, *, policy: str, reach: Reach) -> Row:
    """A backup of every slice, acknowledged by both servers, beside the same job without."""

    def measure(effort: Effort) -> Samples:
        task = Task(kind="push_pull", num_bytes=num_bytes)
        ours, reference = (
            JobSide(task, workers=2, servers=2, policy=policy, replicas=count, transport="shm", side=side)
            for side, count in (("ours", 2), ("reference", 1))
        )
        return play(ours, reference, effort)

    return Row(
        name=name,
        what=f"{size_in_words(num_bytes)} {policy}, 2 workers 2 servers, 2 replicas, from gradients()",
        reference="the same of ours with 1 replica",
        reach=reach,
        measure=measure,
    )
