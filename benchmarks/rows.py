"""The rows there are. A row is a value; its sizes are arguments, so that tests can make small ones."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from benchmarks.adapters import beside_torch
from benchmarks.collecting import all_reduce, all_reduce_mpi, all_reduce_net, all_reduce_small
from benchmarks.footprint import server_memory, worker_memory
from benchmarks.hundreds import coordinator_memory_of_many, coordinator_processor
from benchmarks.leases import coordinator_memory, epoch_start, lease_share
from benchmarks.moving import adam, beside, crowd, finite_check, push_pull, replicas, sync, sync_scaling, tls
from benchmarks.reading import parquet
from benchmarks.row import Reach, Row
from benchmarks.saves import checkpoint
from benchmarks.serve_load import flood, follow_hold, follow_latency, followed
from benchmarks.serving import batching, one_connection, processor, replica_memory, throughput
from benchmarks.showing import showing, showing_alone, tracing
from benchmarks.spanning import ring_beside_servers, ring_codec, ring_early, ring_hosts, ring_net
from benchmarks.stages import pipeline
from benchmarks.starting import start, start_beside_plain
from benchmarks.task import Task
from benchmarks.training import beside_ddp, beside_nccl, beside_strangers, early_beside_late, embedded, on_device
from benchmarks.words import KIB, MIB
from syncline.errors import ConfigError

LARGE, SMALL = 64 * MIB, 4 * KIB
_MEMORY = "shared memory"
_WIDE = "MLP 784-2048-2048-10 batch 32, SGD with momentum"


def all_rows() -> list[Row]:
    return [
        *_moving_rows(),
        *_collective_rows(),
        *_spanning_rows(),
        *_training_rows(),
        *_adapter_rows(),
        *_data_rows(),
        *_save_rows(),
        *_memory_rows(),
        *_shown_rows(),
        *_serve_rows(),
        *_start_rows(),
        *_gpu_rows(),
    ]


def _moving_rows() -> list[Row]:
    return [
        push_pull("shm-large", LARGE, own_arrays=False, floor=_MEMORY, reach=_at_most(1.3)),
        push_pull("shm-large-arrays", LARGE, own_arrays=True, floor=_MEMORY, reach=_at_most(1.7)),
        push_pull("shm-small", SMALL, own_arrays=False, floor="round trip", reach=_at_most(6)),
        beside("shm-beside", SMALL, 64 * MIB, workers=1, reach=_at_most(1.2)),
        beside("shm-beside-2", SMALL, 64 * MIB, workers=2, reach=_at_most(2.5)),
        push_pull("tcp-large", LARGE, own_arrays=False, floor="stream", reach=_at_most(1.4), transport="tcp"),
        tls("tls-large", LARGE, reach=_at_most(1.3)),
        sync("sync-2", LARGE, workers=2, reach=_at_most(0.42)),
        sync("sync-4", LARGE, workers=4, reach=_at_most(0.38)),
        *(finite_check(f"finite-{n}", LARGE, workers=n) for n in (2, 4)),
        sync_scaling("sync-scaling", 16 * MIB, reach=_at_most(4)),
        crowd("async-8-shm", LARGE, workers=8, floor=_MEMORY, transport="shm", reach=_at_most(1.4), num_cores=16),
        crowd("async-8-tcp", LARGE, workers=8, floor="stream", transport="tcp", reach=_at_most(1.6), num_cores=16),
        adam("adam", LARGE, reach=_at_most(1.3)),
        replicas("replicas-sync", LARGE, policy="sync", reach=_at_most(1.6)),
        replicas("replicas-async", LARGE, policy="async", reach=_at_most(2.2)),
    ]


def _collective_rows() -> list[Row]:
    return [
        all_reduce("allreduce-2", LARGE, workers=2, reach=_at_most(0.25)),
        all_reduce("allreduce-4", LARGE, workers=4, reach=_at_most(0.25)),
        *(all_reduce_mpi(f"allreduce-{n}-mpi", LARGE, workers=n, reach=_at_most(0.6)) for n in (2, 4)),
        all_reduce("allreduce-arrays", LARGE, workers=2, own_arrays=True, reach=Reach("printed")),
        all_reduce_small("allreduce-small", SMALL, reach=_at_most(8)),
        all_reduce_net("allreduce-net", LARGE, rate="1gbit", reach=_at_most(1.05)),
    ]


def _spanning_rows() -> list[Row]:
    codecs, printed = {"bf16": 0.51, "int8": 0.27, "topk:0.01": 0.03}, Reach("printed")
    tags = {codec: codec.partition(":")[0] for codec in codecs}
    return [
        ring_net("ring-net", LARGE, rate="1gbit", reach=_at_most(1.05)),
        *(ring_codec(f"ring-{tags[c]}", LARGE, c, rate="1gbit", reach=_at_most(r)) for c, r in codecs.items()),
        *(
            ring_codec(f"ring-{tag}-time", LARGE, codec, rate="1gbit", reach=printed, unit="seconds")
            for codec, tag in tags.items()
        ),
        ring_hosts("ring-hosts", LARGE, each=2, rate="1gbit", unit="seconds"),
        ring_hosts("ring-hosts-bytes", LARGE, each=2, rate="1gbit", unit="bytes"),
        *(ring_early(f"ring-early-{n}", each=n) for n in (1, 2)),
        ring_early("ring-early-gloo", each=1, sums="gloo"),
        ring_early("ring-early-1-slow", each=1, is_stretched=True),
        ring_early("ring-early-2-slow", each=2, is_stretched=True),
        ring_early("ring-early-gloo-slow", each=1, sums="gloo", is_stretched=True),
        *(
            ring_beside_servers(f"ring-servers-{n}-{rate}", 16 * MIB, workers=n, rate=rate)
            for rate in ("1gbit", "10gbit")
            for n in (2, 4, 6)
        ),
    ]


def _training_rows() -> list[Row]:
    small = "MLP 784-128-10 batch 64, Adam"
    return [
        pipeline("pipeline-2", reach=Reach("at least", 0.93)),
        embedded("lenet", "lenet", "LeNet batch 64, Adam", reach=_at_most(1.03)),
        embedded("mlp", "mlp-small", small, reach=_at_most(1.15)),
        beside_ddp("mlp-ddp", "mlp-wide", _WIDE, workers=2, reach=Reach("at least", 1.2)),
        beside_ddp("mlp-ring", "mlp-wide", _WIDE, workers=2, reach=Reach("at least", 1.3), exchange="ring"),
        # Servers take 47 ms for a step where DDP takes 82; the ring is to come to 60.
        beside_ddp("mlp-12", "mlp-wide", _WIDE, workers=12, reach=Reach("printed"), num_cores=16),
        beside_ddp(
            "mlp-12-ring", "mlp-wide", _WIDE, workers=12, reach=Reach("at least", 1.36), exchange="ring", num_cores=16
        ),
        early_beside_late("mlp-early", "mlp-wide", _WIDE, workers=2),
        beside_strangers("mlp-async", "mlp-wide", _WIDE, workers=2, reach=Reach("at least", 0.75)),
        *(
            beside_ddp(f"scaling-{n}", "mlp-wide", _WIDE, workers=n, reach=Reach("at least", 1.0), batch_size=32)
            for n in (1, 2, 4, 8)
        ),
    ]


def _adapter_rows() -> list[Row]:
    # Keras' backends other than TensorFlow are measured where torch is too, so that servers compute alike.
    backends, few = {"torch": "mixed", "jax": "mixed", "tensorflow": "tensorflow"}, _at_most(1.2)
    return [
        *(beside_torch(f"keras-{b}", "keras", environment=e, backend=b, reach=few) for b, e in backends.items()),
        *(beside_torch(f"jax-{by}", f"jax-{by}", environment="mixed", reach=few) for by in ("rule", "optax")),
    ]


def _data_rows() -> list[Row]:
    enough, sizes = Reach("at least", 0.8), {"narrow": 1_000_000, "wide": 32_768, "lists": 65_536}
    return [
        *(lease_share(f"lease-{policy}", policy=policy, reach=_at_most(0.02)) for policy in ("sync", "async")),
        coordinator_memory("lease-memory", 10**9, 20_000_000, reach=_at_most(1)),
        epoch_start("lease-epoch", 10**9, reach=Reach("at most", 0, plus_seconds=1.0)),
        *(parquet(f"parquet-{shape}", shape, rows, reach=enough) for shape, rows in sizes.items()),
        *(
            parquet(f"parquet-{shape}-shuffled", shape, rows, reach=enough, shuffle=True)
            for shape, rows in sizes.items()
        ),
        *(
            parquet(f"parquet-{shape}-groups", shape, rows, reach=Reach("printed"), beside="row_groups")
            for shape, rows in sizes.items()
        ),
    ]


def _save_rows() -> list[Row]:
    return [
        checkpoint("checkpoint-save", 512 * MIB, load=False, reach=_at_most(1.2)),
        checkpoint("checkpoint-load", 512 * MIB, load=True, reach=_at_most(1.2)),
    ]


def _memory_rows() -> list[Row]:
    return [
        server_memory("server-memory", LARGE, transport="shm", num_staged=0, reach=_at_most(1.3)),
        server_memory("server-memory-tcp", LARGE, transport="tcp", num_staged=1, reach=_at_most(1.3)),
        worker_memory("worker-memory", (784, 2688, 2688, 2688, 10), reach=_at_most(2.2)),
    ]


def _shown_rows() -> list[Row]:
    return [
        coordinator_processor("hundreds", 192, 8, 0.2, reach=_at_most(1)),
        coordinator_memory_of_many("hundreds-memory", 192, 8, 200e6, reach=_at_most(1)),
        showing("showing", "lenet", "LeNet batch 64, Adam", reach=_at_most(1.02)),
        showing_alone("showing-alone", "lenet", "LeNet batch 64, Adam", 0.02, reach=_at_most(1)),
        tracing(
            "tracing", Task(kind="train", model="lenet", num_threads=1), "LeNet batch 64, Adam", reach=_at_most(1.05)
        ),
        tracing(
            "tracing-small", Task(kind="push_pull", num_bytes=SMALL), "push-pull of 4 KiB", reach=Reach("printed")
        ),
    ]


def _serve_rows() -> list[Row]:
    models, peers = {"mlp": "Mlp", "lenet": "LeNet"}, ("litserve", "ray")
    most = {0.5: 1.3, 0.99: 1.5}
    return [
        *(
            throughput(f"serve-{tag}-{by}", model, by, reach=Reach("at least", 1.5))
            for tag, model in models.items()
            for by in peers
        ),
        *(
            processor(f"serve-{tag}-{by}-cpu", model, by, reach=Reach("at least", 1.5))
            for tag, model in models.items()
            for by in peers
        ),
        batching("serve-mlp-batches", "Mlp", reach=Reach("at least", 3)),
        batching("serve-lenet-batches", "LeNet", reach=Reach("at least", 1.5)),
        *(
            one_connection(f"serve-{tag}-p{100 * part:g}", model, part, reach=_at_most(ratio))
            for tag, model in models.items()
            for part, ratio in most.items()
        ),
        replica_memory("serve-replica", reach=_at_most(1)),
        flood("serve-flood", reach=_at_most(2)),
        follow_latency("serve-follow", reach=_at_most(1)),
        follow_hold("serve-follow-hold", reach=_at_most(1)),
        followed("serve-follow-lenet", "lenet", "LeNet", "LeNet, batch 64, Adam", reach=Reach("at least", 0.97)),
        followed("serve-follow-mlp", "mlp-wide", "Mlp", _WIDE, reach=Reach("at least", 0.97)),
    ]


def _start_rows() -> list[Row]:
    return [
        start("start", reach=Reach("at most", 2, plus_seconds=1.5)),
        start_beside_plain("start-lenet", reach=_at_most(1.8)),
    ]


def _gpu_rows() -> list[Row]:
    full, half = (f"transformer of 124 M parameters in {d}, Adam" for d in ("float32 batch 8", "bfloat16 batch 64"))
    return [
        on_device("cuda-sync", "gpt", full, reach=_at_most(1.3)),
        on_device("cuda-async", "gpt", full, policy="async", window=1, reach=_at_most(1.1)),
        on_device("cuda-sync-bf16", "gpt-bf16", half, reach=_at_most(1.1)),
        on_device("cuda-async-bf16", "gpt-bf16", half, policy="async", window=1, reach=_at_most(1.02)),
        beside_nccl("nccl-1", "gpt", full, workers=1, reach=Reach("at least", 0.98)),
        beside_nccl("nccl-all", "gpt", full, workers=0, reach=Reach("at least", 0.98)),
        on_device("cuda-server", "gpt", full, server_device="cuda", reach=Reach("printed")),
        *_mixed_rows("gpt-24", "GPT, batch 24", sync=1.25, runs_ahead=1.06, ring=1.02, server=1.12),
        *_mixed_rows("gpt-8", "GPT, batch 8", sync=1.75, runs_ahead=1.25, ring=1.05, server=1.20),
        *_mixed_rows("gpt-compiled", "GPT under torch.compile, batch 24"),
        *_mixed_rows("resnet", "ResNet-50, channels last, batch 128"),
    ]


def _mixed_rows(
    model: str, what: str, *, sync: float = 0, runs_ahead: float = 0, ring: float = 0, server: float = 0
) -> list[Row]:
    """A model that computes in bfloat16 by autocast, in four ways; 0: the figure is only printed."""

    def reach(ratio: float) -> Reach:
        return _at_most(ratio) if ratio else Reach("printed")

    what = f"{what}, autocast"
    return [
        on_device(f"cuda-{model}-sync", model, what, reach=reach(sync)),
        on_device(f"cuda-{model}-async", model, what, policy="async", window=1, reach=reach(runs_ahead)),
        on_device(f"cuda-{model}-nccl", model, what, sums="nccl", reach=reach(ring)),
        on_device(f"cuda-{model}-server", model, what, server_device="cuda", reach=reach(server)),
    ]


def _at_most(ratio: float) -> Reach:
    return Reach("at most", ratio)


def choose(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """The rows with one of these names, where * stands for anything; all without names."""
    for pattern in patterns:
        if not fnmatch.filter([row.name for row in rows], pattern):
            raise ConfigError(f"--only {pattern}: must be one of {', '.join(row.name for row in rows)}")
    return [row for row in rows if not patterns or any(fnmatch.fnmatch(row.name, p) for p in patterns)]
