"""Manifests for Kubernetes: a job's roles as a JobSet, or as plain Jobs. Pure: settings in, JSON-like objects out.

Kubernetes starts each role by hand, as `syncline coordinator`, `server` and `worker` do, with a job file that is made
here and travels in a Secret. A pod is a host of its own. What dies comes back as a new pod under the same name.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from syncline.config import JobConfig
from syncline.errors import ConfigError
from syncline.launch.jobfile import JobFile
from syncline.launch.restarts import LEFT
from syncline.launch.running import Script

#: The coordinator's port, which nothing else in its pod uses.
PORT = 7000
#: Where pods have the Secret; and a folder in memory, for the job file with mode 0600, the journal and the logs.
SECRET_FOLDER, WORK_FOLDER = "/run/secrets/syncline", "/run/syncline"
JOB_FILE = f"{WORK_FOLDER}/job.json"
#: Exit code of a coordinator whose job has failed: not to be started again.
FAILED = 1
#: On top of what a server needs to hand over its slices, or the job to be saved.
GRACE_SECONDS = 30
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST_NAME = 40  # names of pods are made of it, and have 63 characters at most

Object = dict[str, Any]


class Pods(msgspec.Struct, frozen=True, kw_only=True):
    """What the pods of a job are like."""

    name: str
    image: str
    is_plain: bool = False  #: Jobs in place of a JobSet, which needs its controller in the cluster
    namespace: str = ""
    cpus: str = ""  #: of each worker and server
    memory: str = ""
    gpus: int = 0  #: of each worker
    gpu_resource: str = "nvidia.com/gpu"
    selectors: dict[str, str] = {}
    volumes: dict[str, str] = {}  #: name of a PersistentVolumeClaim to the folder where pods have it
    workdir: str = ""
    pull_policy: str = ""

    def check(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > _MOST_NAME:
            raise ConfigError(
                f"--name {self.name!r}: give a name of at most {_MOST_NAME} lower-case letters, digits and hyphens "
                "that begins with a letter"
            )
        if not self.image.strip() or any(letter.isspace() for letter in self.image):
            raise ConfigError(f"--image {self.image!r}: give a container image that has syncline and your script")
        for what, said in (("--cpus", self.cpus), ("--memory", self.memory)):
            if said and not re.fullmatch(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?", said):
                raise ConfigError(f"{what} {said!r}: give a quantity of Kubernetes, e.g. 4, 500m or 16Gi")
        if self.gpus < 0:
            raise ConfigError(f"--gpus {self.gpus}: must be 0 or more")
        for claim, folder in self.volumes.items():
            if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", claim) or not folder.startswith("/"):
                raise ConfigError(f"--volume {claim}:{folder}: give CLAIM:/FOLDER, e.g. data:/mnt/data")
            if folder.rstrip("/") in (SECRET_FOLDER, WORK_FOLDER):
                raise ConfigError(f"--volume {claim}:{folder}: {folder} is used by syncline itself")

    def coordinator_host(self) -> str:
        """The name by which members find the coordinator's pod."""
        return (
            f"{self.name}-coordinator-0.{self.name}" if self.is_plain else f"{self.name}-coordinator-0-0.{self.name}"
        )


def manifest(pods: Pods, config: JobConfig, file: JobFile, script: Script) -> Object:
    """All objects of a job, as a List."""
    roles = {"coordinator": 1, **({} if config.is_ring else {"server": config.servers}), "worker": config.workers}
    commands = {role: command_of(role, script) for role in roles}
    jobs = {role: _job(role, count, commands[role], pods, config) for role, count in roles.items()}
    items: list[Object] = [_secret(pods, file)]
    if pods.is_plain:
        items.append(_service(pods))
        items += [
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": _metadata(pods, f"{pods.name}-{role}", role),
                "spec": job,
            }
            for role, job in jobs.items()
        ]
    else:
        items.append(_job_set(pods, jobs))
    if not config.is_ring and config.servers > 1:
        items.append(_budget(pods, "server"))
    return {"apiVersion": "v1", "kind": "List", "items": items}


def command_of(role: str, script: Script) -> list[str]:
    """What a pod of this role runs. The job file is copied: files of a Secret may have another owner or mode."""
    words = ["syncline", role, "--job", JOB_FILE]
    own = {
        "coordinator": f'{shlex.join([*words, "--made"])} --bind "$POD_IP"',
        "server": f'{shlex.join([*words, "--comes-back"])} --name "server-$JOB_COMPLETION_INDEX" --host "$POD_NAME"',
        "worker": f'{shlex.join([*words, "--comes-back"])} --name "worker-$JOB_COMPLETION_INDEX" --host "$POD_NAME"',
    }[role]
    if role == "worker":
        module = ["-m"] if script.is_module else []
        own += " " + shlex.join([*module, script.path, *script.arguments])
    # The journal of an earlier life has the job's term in it, so the copy of the file alone is made again.
    copied = f"umask 077 && cp {SECRET_FOLDER}/job.json {JOB_FILE}"
    return ["/bin/sh", "-c", f"{copied} && exec {own}"]


def _metadata(pods: Pods, name: str, role: str = "") -> Object:
    labels = {"app.kubernetes.io/name": "syncline", "app.kubernetes.io/instance": pods.name}
    if role:
        labels["app.kubernetes.io/component"] = role
    found: Object = {"name": name, "labels": labels}
    if pods.namespace:
        found["namespace"] = pods.namespace
    return found


def _secret(pods: Pods, file: JobFile) -> Object:
    data = base64.b64encode(msgspec.json.encode(file)).decode()
    return {
        "apiVersion": "v1", "kind": "Secret", "metadata": _metadata(pods, pods.name), "type": "Opaque",
        "data": {"job.json": data},
    }  # fmt: skip


def _service(pods: Pods) -> Object:
    """Names for pods; also before they are ready, since they wait for each other."""
    spec = {
        "clusterIP": "None", "publishNotReadyAddresses": True,
        "selector": {"app.kubernetes.io/instance": pods.name},
        "ports": [{"name": "coordinator", "port": PORT}],
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(pods, pods.name), "spec": spec}


def _job_set(pods: Pods, jobs: Mapping[str, Object]) -> Object:
    """Its controller makes the headless service; the failure of one of its Jobs is that of all."""
    replicated = [
        {
            "name": role,
            "replicas": 1,
            "template": {"metadata": {"labels": _metadata(pods, role, role)["labels"]}, "spec": job},
        }
        for role, job in jobs.items()
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(pods, pods.name),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": pods.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": replicated,
        },
    }  # fmt: skip


def _budget(pods: Pods, role: str) -> Object:
    """A drain takes one server at a time, which hands over its slices first."""
    labels = _metadata(pods, pods.name, role)["labels"]
    return {
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": _metadata(pods, f"{pods.name}-{role}s"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }  # fmt: skip


def _job(role: str, count: int, command: Sequence[str], pods: Pods, config: JobConfig) -> Object:
    """A pod per member. A pod that dies comes back under its index, which is its name. An index is complete with exit
    code 0: so a pod that SIGTERM has made leave has another code. Neither that nor an eviction counts.
    """
    told = {"containerName": role, "operator": "In", "values": [LEFT]}
    rules: list[Object] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": told},
    ]
    if role == "coordinator":
        codes = {"containerName": role, "operator": "In", "values": [FAILED]}
        rules.append({"action": "FailJob", "onExitCodes": codes})
    return {
        "completions": count, "parallelism": count, "completionMode": "Indexed",
        "backoffLimitPerIndex": config.max_restarts, "maxFailedIndexes": count - 1 if role == "worker" else 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": {
            "metadata": {"labels": _metadata(pods, role, role)["labels"]}, "spec": _pod(role, command, pods, config),
        },
    }  # fmt: skip


def _pod(role: str, command: Sequence[str], pods: Pods, config: JobConfig) -> Object:
    claims = {f"claim-{number}": each for number, each in enumerate(pods.volumes.items())}
    mounts = [
        {"name": "job", "mountPath": SECRET_FOLDER, "readOnly": True}, {"name": "work", "mountPath": WORK_FOLDER},
        *({"name": name, "mountPath": folder} for name, (_, folder) in claims.items()),
    ]  # fmt: skip
    container: Object = {
        "name": role, "image": pods.image, "command": list(command), "volumeMounts": mounts,
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
    }  # fmt: skip
    if pods.workdir:
        container["workingDir"] = pods.workdir
    if pods.pull_policy:
        container["imagePullPolicy"] = pods.pull_policy
    if resources := _resources(role, pods):
        container["resources"] = resources
    if role == "coordinator":
        container["ports"] = [{"name": "coordinator", "containerPort": PORT}]
        probe = {"tcpSocket": {"port": PORT}}
        container["startupProbe"] = {**probe, "periodSeconds": 2, "failureThreshold": 60}
        container["readinessProbe"] = {**probe, "periodSeconds": 10}
        container["livenessProbe"] = {**probe, "periodSeconds": 20, "failureThreshold": 3, "timeoutSeconds": 5}
    spec: Object = {
        "restartPolicy": "Never",
        "subdomain": pods.name,
        "terminationGracePeriodSeconds": int(max(config.leave_seconds, config.save_seconds)) + GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "shareProcessNamespace": True,  # else the member is process 1, which a signal without a handler does not end
        "containers": [container],
        "volumes": [
            {"name": "job", "secret": {"secretName": pods.name, "defaultMode": 0o440}},
            {"name": "work", "emptyDir": {"medium": "Memory"}},
            *({"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, (claim, _) in claims.items()),
        ],
    }  # fmt: skip
    if not pods.is_plain:
        del spec["subdomain"]  # the JobSet's own
    if pods.selectors:
        spec["nodeSelector"] = dict(pods.selectors)
    if role == "server":
        labels = _metadata(pods, role, role)["labels"]
        spec["topologySpreadConstraints"] = [{
            "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels},
        }]  # fmt: skip
    return spec


def _resources(role: str, pods: Pods) -> Object:
    if role == "coordinator":
        return {"requests": {"cpu": "100m", "memory": "256Mi"}}
    requests = {name: said for name, said in (("cpu", pods.cpus), ("memory", pods.memory)) if said}
    limits = {"memory": pods.memory} if pods.memory else {}
    if role == "worker" and pods.gpus:
        limits[pods.gpu_resource] = str(pods.gpus)
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}
