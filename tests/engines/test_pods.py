"""Manifests before Kubernetes' own schemas; and their pods' exact commands as processes, with their mounts."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest
from tests.engines.clusters import wait_until
from tests.engines.conftest import STEPS, Engine
from tests.engines.test_manifest import made, pods_of
from tests.patience import PATIENCE

pytestmark = pytest.mark.engines

FULL = (
    "--gpus 2 --cpus 4 --memory 16Gi --node-selector pool=gpu --volume data:/mnt/data --workdir /app --namespace ml "
    "--pull-policy Always --checkpoint /mnt/data/saves -w 3 -s 2 train.py --epochs 3"
)
#: The objects but the JobSet go to kubernetes-validate; a JobSet's Jobs too, as Jobs of their own.
VALIDATE = """
import json, sys
import kubernetes_validate
items = json.load(sys.stdin)["items"]
for item in list(items):
    if item["kind"] == "JobSet":
        from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
        items.remove(item)
        dump = JobsetV1alpha2JobSet.from_dict(item).to_dict()
        dump.get("metadata", {}).pop("creationTimestamp", None)
        def missing(there, here, path):
            if isinstance(there, dict):
                for key, value in there.items():
                    if not isinstance(here, dict) or key not in here:
                        raise SystemExit(f"JobSet: {path}.{key} is unknown")
                    missing(value, here[key], f"{path}.{key}")
            elif isinstance(there, list):
                if not isinstance(here, list) or len(here) != len(there):
                    raise SystemExit(f"JobSet: {path} is unknown")
                for k, value in enumerate(there):
                    missing(value, here[k], f"{path}[{k}]")
        missing(item, dump, "JobSet")
        for job in item["spec"]["replicatedJobs"]:
            template = job["template"]
            meta = {**template["metadata"], "name": job["name"]}
            items.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": template["spec"]})
for item in items:
    try:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
    except Exception as error:
        raise SystemExit(f"{item['kind']}: {error}")
print(len(items), "objects")
"""


def validate(objects: dict[str, dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    folder = os.environ.get("SYNCLINE_TEST_VALIDATORS", "")
    if not os.path.isdir(folder):
        pytest.skip("there are no kubernetes-validate and kubeflow-trainer-api: make test-engines installs them")
    text = json.dumps({"items": list(objects.values())})
    environment = {**os.environ, "PYTHONPATH": folder}
    return subprocess.run(
        [sys.executable, "-c", VALIDATE], input=text, capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize("words", ["train.py", FULL, f"--plain {FULL}", "--exchange ring -w 2 train.py"])
def test_manifests_are_valid(words: str) -> None:
    done = validate(made(*words.split()))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("--plain t.py", ("Job/lenet-worker", "spec", "completionModes")),
        ("t.py", ("JobSet/lenet", "spec", "networks")),
        ("-s 2 t.py", ("PodDisruptionBudget/lenet-servers", "spec", "maxUnavailables")),
    ],
)
def test_the_validators_see_a_misspelled_field(words: str, path: tuple[str, str, str]) -> None:
    """Else the test above proves nothing."""
    objects = made(*words.split())
    kind, spec, field = path
    objects[kind][spec][field] = objects[kind][spec].pop(field[:-1])
    done = validate(objects)
    assert done.returncode != 0 and field in done.stderr, done.stderr


class Pods:
    """Starts the pods of a manifest as processes, each in mounts of its own: its Secret, its emptyDir, its names."""

    def __init__(self, engine: Engine, objects: dict[str, dict[str, Any]]) -> None:
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            pytest.skip("mounts of their own need root and unshare")
        self._engine, self._specs = engine, pods_of(objects)
        data = objects["Secret/lenet"]["data"]
        self._secret = engine.folder / "secret"
        self._secret.mkdir()
        for name, text in data.items():
            (self._secret / name).write_bytes(base64.b64decode(text))
            (self._secret / name).chmod(0o440)
        host = json.loads(base64.b64decode(data["job.json"]))["host"]
        self._hosts = engine.folder / "hosts"
        self._hosts.write_text(f"127.0.0.1 localhost {host}\n")

    def status(self) -> list[str]:
        """The members of the job, as `syncline status` in the coordinator's pod shows them."""
        file = self._engine.folder / "here.json"
        if not file.exists():
            file.touch(mode=0o600)
            said = json.loads((self._secret / "job.json").read_bytes())
            file.write_text(json.dumps({**said, "host": "127.0.0.1"}))
        code, output = self._engine.run(["syncline", "status", str(file), "--json"])
        return [member["name"] for member in json.loads(output)["members"]] if code == 0 else []

    def start(self, role: str, index: int = 0) -> subprocess.Popen[str]:
        (container,) = self._specs[role]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {"job", "work"}
        script = "\n".join([
            "set -e", "mount --make-rprivate /", "mount -t tmpfs tmpfs /run",
            f"mkdir -p {mounts['job']} {mounts['work']}",
            f"mount --bind {self._secret} {mounts['job']}", f"mount --bind {self._hosts} /etc/hosts",
            'exec "$@"',
        ])  # fmt: skip
        known = {"metadata.name": f"lenet-{role}-{index}-abcde", "status.podIP": "127.0.0.1"}
        environment = {one["name"]: known[one["valueFrom"]["fieldRef"]["fieldPath"]] for one in container["env"]}
        words = ["unshare", "--mount", "sh", "-c", script, "sh", *container["command"]]
        return self._engine.start(words, {**environment, "JOB_COMPLETION_INDEX": str(index)})


@pytest.mark.parametrize("plain", [["--plain"], []], ids=["jobs", "jobset"])
def test_the_pods_of_a_job_as_processes(engine: Engine, plain: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Members start before the coordinator. A worker is killed, then a server, whose slices have a second replica;
    the same commands bring them back. SIGTERM is an eviction, and that a leave."""
    monkeypatch.chdir(engine.folder)
    engine.script(STEPS)
    engine.leave_out_torch()
    (engine.folder / "syncline.toml").write_text("start_seconds = 300.0\ndeadline_seconds = 10.0\n")
    pods = Pods(engine, made(*plain, "-w", "2", "-s", "2", "train.py"))
    workers = [pods.start("worker", k) for k in range(2)]
    servers = [pods.start("server", k) for k in range(2)]
    coordinator = pods.start("coordinator")
    engine.lives("worker-0", 1, coordinator)
    os.kill(int(engine.lives("worker-1", 1, coordinator)[0][0]), signal.SIGKILL)
    assert workers[1].wait(PATIENCE) != 0
    workers[1] = pods.start("worker", 1)
    second = engine.lives("worker-1", 2, coordinator)[1]
    assert float(second[2]) < 0, "the second life began with the parameters of the job"
    (server,) = engine.members("server-1")
    os.kill(server, signal.SIGKILL)
    assert servers[1].wait(PATIENCE) != 0
    engine.goes_on("worker-0")
    wait_until(lambda: "server-1" not in pods.status(), "server-1 is not missed")
    servers[1] = pods.start("server", 1)
    wait_until(lambda: "server-1" in pods.status(), "server-1 has not come back")
    engine.goes_on("worker-1")
    workers[0].terminate()
    code, output = engine.finish(workers[0])
    assert code == 0, output
    engine.end_steps()
    ends = [engine.finish(process) for process in (workers[1], *servers, coordinator)]
    assert [code for code, _ in ends] == [0, 0, 0, 0], ends
    assert "worker-1 ends" in ends[0][1]
    assert not list(pathlib.Path("/run/secrets").glob("syncline/job.json"))
