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

from syncline.launch.restarts import LEFT
from syncline.store.disk import MANIFEST

pytestmark = pytest.mark.engines

#: The pods of a job with two workers and two servers.
COUNTS = (("coordinator", 1), ("server", 2), ("worker", 2))

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

    def forget_names(self) -> None:
        """No other pod has an address."""
        self._hosts.write_text("127.0.0.1 localhost\n")

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


def begin(engine: Engine, *words: str, toml: str = "") -> Pods:
    """The pods of a job that runs `STEPS`; none has started."""
    engine.script(STEPS)
    engine.leave_out_torch()
    (engine.folder / "syncline.toml").write_text(toml or "start_seconds = 300.0\ndeadline_seconds = 10.0\n")
    return Pods(engine, made(*words, "train.py"))


@pytest.mark.parametrize("plain", [["--plain"], []], ids=["jobs", "jobset"])
def test_the_pods_of_a_job_as_processes(engine: Engine, plain: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Members start before the coordinator. A worker is killed, then a server, whose slices have a second replica;
    the same commands bring them back."""
    monkeypatch.chdir(engine.folder)
    pods = begin(engine, *plain, "-w", "2", "-s", "2")
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
    engine.end_steps()
    ends = [engine.finish(process) for process in (*workers, *servers, coordinator)]
    assert [code for code, _ in ends] == [0] * 5, ends
    assert "worker-1 ends" in ends[1][1]
    assert not list(pathlib.Path("/run/secrets").glob("syncline/job.json"))


def test_a_pod_that_is_evicted_comes_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain takes one pod after the other, by SIGTERM. With exit code 0 an index of a Job is complete, and its pod
    never returns: the drain would empty the job. The last worker that leaves does not end it either."""
    monkeypatch.chdir(engine.folder)
    pods = begin(engine, "-w", "2", "-s", "2")
    coordinator = pods.start("coordinator")
    servers = [pods.start("server", k) for k in range(2)]
    workers = [pods.start("worker", k) for k in range(2)]
    for name in ("worker-0", "worker-1"):
        engine.lives(name, 1, coordinator)
        engine.goes_on(name)
    for worker in workers:
        worker.terminate()
        code, output = engine.finish(worker)
        assert code == LEFT, output
    wait_until(lambda: sorted(pods.status()) == ["server-0", "server-1"], "the workers are still there")
    workers = [pods.start("worker", k) for k in range(2)]
    for name in ("worker-0", "worker-1"):
        assert float(engine.lives(name, 2, coordinator)[1][2]) < 0, "the job began again"
    servers[1].terminate()
    code, output = engine.finish(servers[1])
    assert code == LEFT, output
    servers[1] = pods.start("server", 1)
    wait_until(lambda: "server-1" in pods.status(), "server-1 has not come back")
    engine.goes_on("worker-0")
    engine.end_steps()
    ends = [engine.finish(process) for process in (*workers, *servers, coordinator)]
    assert [code for code, _ in ends] == [0] * 5, ends


def test_the_whole_job_is_told_to_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kubectl delete` sends SIGTERM to all pods at once: the job is saved first, while its members stay for that.
    The same pods take it up again later."""
    monkeypatch.chdir(engine.folder)
    pods = begin(engine, "-w", "2", "-s", "2", "--checkpoint", "saves", "--save-every", "1000h")
    saved = 0
    for life in (1, 2):
        started = [pods.start(role, k) for role, count in COUNTS for k in range(count)]
        for name in ("worker-0", "worker-1"):
            begun = float(engine.lives(name, life, started[0])[-1][2])
            assert -begun >= saved, "each step takes 1 from the parameter"
        engine.goes_on("worker-0")
        steps = int((engine.folder / "at-worker-0").read_text()) // 2  # the two workers share them
        for process in started:
            process.terminate()
        ends = [engine.finish(process) for process in started]
        assert [code for code, _ in ends] == [LEFT] * len(started), ends
        assert "saved " in ends[0][1], ends[0][1]
        newest = max(engine.folder.glob(f"saves/*/{MANIFEST}"), key=lambda path: path.stat().st_mtime_ns)
        saved = json.loads(newest.read_text().splitlines()[0])["step"]
        assert saved >= steps > 0, ends[0][1]


def test_a_job_without_a_checkpoint_ends_with_its_coordinator(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal is in its pod: no other coordinator knows the job. Members that wait for it would be there for a
    minute after `kubectl delete`; where its pod alone was evicted, they begin again with the next coordinator."""
    monkeypatch.chdir(engine.folder)
    pods = begin(engine, "-s", "1")
    started = [pods.start(role) for role, _ in COUNTS]
    engine.lives("worker-0", 1, started[0])
    engine.goes_on("worker-0")
    started[0].terminate()
    ends = [engine.finish(process) for process in started]
    assert [code for code, _ in ends] == [LEFT] * 3, ends
    assert "SIGTERM has ended the coordinator" in ends[2][1]


def test_the_coordinators_pod_is_lost(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its host: nothing is left of its journal. Members end when they have missed it for long enough, come back
    with a coordinator that knows nothing, and the job goes on from its newest checkpoint."""
    monkeypatch.chdir(engine.folder)
    toml = "start_seconds = 300.0\ncoordinator_seconds = 2.0\n"
    pods = begin(engine, "-s", "1", "--checkpoint", "saves", "--save-every", "20steps", toml=toml)
    started = [pods.start(role) for role, _ in COUNTS]
    engine.lives("worker-0", 1, started[0])
    engine.wait_for_save("saves", started[0])
    (coordinator,) = engine.members("coordinator")
    os.kill(coordinator, signal.SIGKILL)
    ends = [engine.finish(process) for process in started]
    assert [code for code, _ in ends[1:]] == [LEFT] * 2, ends
    started = [pods.start(role) for role, _ in COUNTS]
    assert float(engine.lives("worker-0", 2, started[0])[1][2]) < 0, "it goes on from the checkpoint"
    engine.goes_on("worker-0")
    engine.end_steps()
    ends = [engine.finish(process) for process in started]
    assert [code for code, _ in ends] == [0] * 3, ends
    assert "resumes from" in ends[0][1]


def test_a_pod_waits_for_one_that_is_pending(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a pod that does not run yet is unknown. A member says what it waits for, and where to look; a
    coordinator says who is missing. Neither waits for ever."""
    monkeypatch.chdir(engine.folder)
    pods = begin(engine, "-s", "1", toml="start_seconds = 8.0\n")
    pods.forget_names()
    started = [pods.start(role) for role in ("worker", "server")]
    for code, output in map(engine.finish, started):
        assert code in (1, 2), output
        assert "waits for the coordinator at lenet-coordinator-0-0.lenet:7000" in output
        assert "within 8 s" in output and "kubectl describe pod" in output and "--start-seconds" in output
    code, output = engine.finish(pods.start("coordinator"))
    assert code == 1 and "did not come up within 8 s" in output and "--start-seconds" in output, output
