"""Ray Data as a source of samples, on a real Ray."""

from __future__ import annotations

import pytest
from tests.engines.conftest import Engine

pytestmark = pytest.mark.engines


def test_every_sample_of_a_dataset_counts_once(ray: Engine) -> None:
    """In two epochs, in several blocks of unequal size, with a column of tensors; and a worker is killed in between.
    What was acknowledged counts, and nothing twice.
    """
    script = ray.script("""
        import os, pathlib, signal
        import numpy as np, syncline, syncline.ray
        from syncline.data import batches

        def train():
            job = syncline.init()
            job.kv.register({"seen": np.zeros(300)}, syncline.Rule("SGD", lr=1.0))
            source = syncline.ray.source("train")
            victim = job.name == "worker-1" and not pathlib.Path("killed").exists()
            for epoch in range(2):
                for number, batch in enumerate(batches(source, 8, shuffle=True)):
                    assert batch["x"].shape == (len(batch["id"]), 2, 3), batch["x"].shape
                    assert (batch["x"][:, 1, 2] == batch["id"]).all()
                    if victim and number == 2:
                        pathlib.Path("killed").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    seen = np.zeros(300)
                    seen[batch["id"]] = -1.0
                    job.kv.push({"seen": seen}).wait()
            job.barrier("done")
            if job.is_chief:
                seen = job.kv.pull()["seen"]
                print(f"SEEN {seen.min():g} to {seen.max():g} times; {source.describe()}", flush=True)

        def opens_another():
            syncline.init()
            syncline.ray.source("other")

        if __name__ == "__main__":
            import ray
            ray.init(log_to_driver=False)
            numbers = np.arange(300)
            table = {"id": numbers, "x": np.repeat(numbers, 6).reshape(-1, 2, 3)}
            data = ray.data.from_numpy([table["x"]]).repartition(7)
            data = data.map_batches(lambda batch: {"id": batch["data"][:, 0, 0], "x": batch["data"]})
            common = dict(page="off", policy="async", cpus_per_worker=0.5)
            syncline.ray.run(train, workers=2, data={"train": data}, **common)
            for bad in ({"train": [1, 2]}, {"train": data.limit(0)}):
                try:
                    syncline.ray.run(train, data=bad, **common)
                except syncline.SynclineError as error:
                    print("REFUSED", error, flush=True)
            try:
                syncline.ray.run(opens_another, data={"train": data}, max_restarts=0, **common)
            except syncline.JobFailed:
                print("FAILED", flush=True)
    """)
    code, output = ray.run(["python", script])
    assert code == 0, output
    assert "SEEN 2 to 2 times; 7 Ray Data files, 300 rows: columns id, x" in output, output
    assert "worker-1 was killed by SIGKILL" in output, output
    assert "REFUSED data: 'train' is list; give a dataset of ray.data" in output, output
    assert "REFUSED data: 'train' has no row" in output, output
    assert "this job has no data 'other', there is train" in output and "FAILED" in output, output
    ray.check_nothing_left()
