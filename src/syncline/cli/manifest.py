"""`syncline manifest`: prints a job for Kubernetes."""

from __future__ import annotations

import re
import secrets
import sys
from typing import Annotated, Any

import msgspec
import typer

from syncline import config as configuration
from syncline.cli.options import settings_of, takes_job_options
from syncline.cli.run import chosen_script
from syncline.core.settings import check_settings
from syncline.engines.kubernetes import PORT, WORK_FOLDER, Pods
from syncline.engines.kubernetes import manifest as manifest_of
from syncline.errors import ConfigError
from syncline.launch.hosts import parse_workers
from syncline.launch.jobfile import JobFile
from syncline.launch.running import default_name, settle_servers
from syncline.launch.saving import settle_saving


@takes_job_options
def manifest(
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Container image with syncline and the script.")],
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="Script that every worker runs, as the image has it.")
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Given to the script.")] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module instead.")] = None,
    workers: Annotated[
        str | None, typer.Option("-w", "--workers", metavar="N", help="Number of workers. [default: 1]")
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(help="Of a member whose pod fails, in all; evictions do not count. [default: 3]"),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Jobs and a Service in place of a JobSet, which needs its controller.")
    ] = False,
    namespace: Annotated[str, typer.Option(help="Namespace of all objects. [default: kubectl's]")] = "",
    cpus: Annotated[str, typer.Option(metavar="QUANTITY", help="Of each worker and server: 4, 500m.")] = "",
    memory: Annotated[str, typer.Option(metavar="QUANTITY", help="Of each worker and server: 16Gi.")] = "",
    gpus: Annotated[int, typer.Option(metavar="N", help="Of each worker.")] = 0,
    gpu_resource: Annotated[str, typer.Option(help="Their name in the cluster.")] = "nvidia.com/gpu",
    selectors: Annotated[
        list[str] | None,
        typer.Option("--node-selector", metavar="KEY=VALUE", help="Nodes for all pods; may be said several times."),
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM:/FOLDER", help="A PersistentVolumeClaim, e.g. for --checkpoint and data."),
    ] = None,
    workdir: Annotated[str, typer.Option(metavar="FOLDER", help="Working folder. [default: the image's]")] = "",
    pull_policy: Annotated[str, typer.Option(help="Always, IfNotPresent or Never. [default: Kubernetes']")] = "",
    **said: Any,
) -> None:
    """Prints a job for Kubernetes, as JSON, which kubectl takes like YAML.

    A Secret with the job's new token, a JobSet with a coordinator, servers and workers, and a PodDisruptionBudget.
    The output has the token: give it to kubectl, and do not keep it. Every job needs a --name of its own.

    Example:  syncline manifest -w 8 -s 2 --name lenet --image registry.example/lenet train.py | kubectl apply -f -
    """
    launch = settings_of(said)
    target = chosen_script(script, module, arguments or [])
    given = {
        "workers": 1,
        **configuration.read_toml_here(),
        **launch,
        **(parse_workers(workers) if workers is not None else {}),
        **({"max_restarts": max_restarts} if max_restarts is not None else {}),
    }
    if given.get("most_workers"):
        raise ConfigError(f"-w {workers}: Kubernetes' Jobs have a fixed number of pods; give one number")
    for name in ("bind", "runs", "stages"):
        if name in given:
            raise ConfigError(f"{name} and a manifest cannot be combined: the pods decide it")
    name = str(given.get("name") or re.sub(r"[^a-z0-9]+", "-", default_name(target).lower())[-40:].strip("-"))
    given = {**configuration.check_known(given, "command line"), "name": name, "runs": WORK_FOLDER}
    config = configuration.resolve(given)
    check_settings(config)
    pods = Pods(
        name=name, image=image, is_plain=plain, namespace=namespace, cpus=cpus, memory=memory, gpus=gpus,
        gpu_resource=gpu_resource, workdir=workdir, pull_policy=pull_policy,
        selectors=_pairs(selectors, "=", "--node-selector"), volumes=_pairs(volume, ":", "--volume"),
    )  # fmt: skip
    pods.check()
    given = settle_saving(settle_servers(given, config, [f"pod {number}" for number in range(config.servers)]))
    file = JobFile(
        job=secrets.token_hex(8), token=secrets.token_hex(32), host=pods.coordinator_host(), port=PORT, given=given
    )
    made = manifest_of(pods, configuration.resolve(given), file, target)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(made), indent=2).decode() + "\n")


def _pairs(said: list[str] | None, separator: str, option: str) -> dict[str, str]:
    found = {}
    for word in said or ():
        key, sign, value = word.partition(separator)
        if not (key and sign and value):
            raise ConfigError(f"{option} {word!r}: give KEY{separator}VALUE")
        found[key] = value
    return found
