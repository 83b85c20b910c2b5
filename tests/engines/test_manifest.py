"""`syncline manifest`: what is in the objects, what is refused. Validators and pods are in test_pods.py."""

from __future__ import annotations

import base64
import json
import pathlib
from typing import Any

import pytest
from typer.testing import CliRunner

from syncline.cli.main import app
from syncline.errors import ConfigError

Objects = dict[str, dict[str, Any]]


def made(*words: str) -> Objects:
    """The objects by their kinds, with the specs of jobs by role."""
    done = CliRunner().invoke(app, ["manifest", "--image", "example/i", "--name", "lenet", *words])
    if isinstance(done.exception, ConfigError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return {item["kind"] + "/" + item["metadata"]["name"]: item for item in json.loads(done.output)["items"]}


def pods_of(objects: Objects) -> dict[str, dict[str, Any]]:
    """The spec of each role's pods."""
    if "JobSet/lenet" in objects:
        jobs = {one["name"]: one["template"] for one in objects["JobSet/lenet"]["spec"]["replicatedJobs"]}
    else:
        jobs = {key.rpartition("-")[2]: item for key, item in objects.items() if key.startswith("Job/")}
    return {role: job["spec"]["template"]["spec"] for role, job in jobs.items()}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_token_is_in_the_secret_and_nowhere_else() -> None:
    objects = made("-w", "3", "-s", "2", "train.py", "--lr", "0.1")
    secret = objects.pop("Secret/lenet")
    file = json.loads(base64.b64decode(secret["data"]["job.json"]))
    assert (file["host"], file["port"]) == ("lenet-coordinator-0-0.lenet", 7000)
    assert file["given"]["workers"] == 3 and file["given"]["replicas"] == 2
    assert len(bytes.fromhex(file["token"])) == 32 and file["token"] not in json.dumps(objects)
    assert (
        json.loads(base64.b64decode(made("train.py")["Secret/lenet"]["data"]["job.json"]))["token"] != file["token"]
    )


def test_each_member_has_a_pod_of_its_name() -> None:
    objects = made("-w", "3", "-s", "2", "train.py", "--lr", "a b")
    pods = pods_of(objects)
    assert list(pods) == ["coordinator", "server", "worker"]
    command = pods["worker"]["containers"][0]["command"]
    assert command[:2] == ["/bin/sh", "-c"]
    assert command[2].endswith(
        'exec syncline worker --job /run/syncline/job.json --comes-back --name "worker-$JOB_COMPLETION_INDEX" '
        "--host \"$POD_NAME\" train.py --lr 'a b'"
    )
    jobs = {one["name"]: one["template"]["spec"] for one in objects["JobSet/lenet"]["spec"]["replicatedJobs"]}
    assert [(job["completions"], job["parallelism"]) for job in jobs.values()] == [(1, 1), (2, 2), (3, 3)]
    assert all(job["completionMode"] == "Indexed" for job in jobs.values())
    assert objects["PodDisruptionBudget/lenet-servers"]["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("role", ["coordinator", "server", "worker"])
def test_a_pod_that_was_told_to_leave_comes_back_uncounted(role: str) -> None:
    """Exit code 0 completes an index for good; what is not ignored counts against --max-restarts."""
    objects = made("-w", "2", "-s", "2", "--max-restarts", "5", "--save-seconds", "100", "train.py")
    jobs = {one["name"]: one["template"]["spec"] for one in objects["JobSet/lenet"]["spec"]["replicatedJobs"]}
    rules = jobs[role]["podFailurePolicy"]["rules"]
    disruption = {"type": "DisruptionTarget", "status": "True"}
    assert rules[0] == {"action": "Ignore", "onPodConditions": [disruption]}
    assert rules[1] == {
        "action": "Ignore", "onExitCodes": {"containerName": role, "operator": "In", "values": [143]}
    }  # fmt: skip
    assert [rule["action"] for rule in rules[2:]] == (["FailJob"] if role == "coordinator" else [])
    assert jobs[role]["backoffLimitPerIndex"] == 5 and jobs[role]["podReplacementPolicy"] == "Failed"
    pod = pods_of(objects)[role]
    assert pod["terminationGracePeriodSeconds"] == 130, "the save comes first"
    assert pod["shareProcessNamespace"], "no signal ends process 1 of a namespace before it has a handler"
    assert ("--made" if role == "coordinator" else "--comes-back") in pod["containers"][0]["command"][2]


def test_plain_jobs_have_a_service_of_their_own() -> None:
    objects = made("--plain", "-w", "2", "train.py")
    file = json.loads(base64.b64decode(objects["Secret/lenet"]["data"]["job.json"]))
    assert file["host"] == "lenet-coordinator-0.lenet"
    assert objects["Service/lenet"]["spec"]["publishNotReadyAddresses"] is True
    assert all(pod["subdomain"] == "lenet" for pod in pods_of(objects).values())
    assert "PodDisruptionBudget/lenet-servers" not in objects  # a single server


def test_a_ring_has_no_servers() -> None:
    assert list(pods_of(made("--exchange", "ring", "-w", "2", "train.py"))) == ["coordinator", "worker"]


def test_resources_selectors_and_volumes() -> None:
    words = "--gpus 2 --cpus 4 --memory 16Gi --node-selector pool=gpu --volume data:/mnt/data --workdir /app"
    pods = pods_of(made(*words.split(), "-s", "1", "train.py"))
    worker, server = (pods[role]["containers"][0] for role in ("worker", "server"))
    assert worker["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/gpu": "2"}
    assert server["resources"] == {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}}
    assert all(pod["nodeSelector"] == {"pool": "gpu"} for pod in pods.values())
    assert worker["workingDir"] == "/app" and worker["volumeMounts"][-1]["mountPath"] == "/mnt/data"
    claims = [one["persistentVolumeClaim"] for one in pods["worker"]["volumes"] if "persistentVolumeClaim" in one]
    assert claims == [{"claimName": "data"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--name Le_Net t.py", "--name 'Le_Net': give a name of at most 40 lower-case letters"),
        (f"--name {'a' * 41} t.py", "at most 40"),
        ("-w 2:4 t.py", "fixed number of pods"),
        ("--memory lots t.py", "--memory 'lots': give a quantity of Kubernetes"),
        ("--gpus -1 t.py", "--gpus -1: must be 0 or more"),
        ("--node-selector gpu t.py", "--node-selector 'gpu': give KEY=VALUE"),
        ("--volume data t.py", "--volume 'data': give KEY:VALUE"),
        ("--volume data:mnt t.py", "--volume data:mnt: give CLAIM:/FOLDER"),
        ("--volume data:/run/syncline t.py", "is used by syncline itself"),
        ("--bind 1.2.3.4 t.py", "bind and a manifest cannot be combined"),
        ("--replicas 2 t.py", "--replicas 2 needs two servers"),
        ("", "no script was given"),
    ],
)
def test_bad_input(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(*words.split())
