"""`--stages auto` and `--micro-batches auto`: planned before a job starts, since its processes depend on the plan."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from syncline import config as configuration
from syncline.core.units import counted
from syncline.errors import ConfigError
from syncline.launch.hosts import parse_hosts
from syncline.launch.running import Script, settle_here
from syncline.net.shm import bytes_for_each


def plan_launch(launch: Mapping[str, Any], script: Script) -> dict[str, int]:
    """The numbers of stages and micro-batches, where they were left to the scheduler; nothing if they were not.

    A process of its own runs the script up to its first batch and measures the layers there. What it measures is
    kept, so only the first start of a model takes longer.
    """
    said = {**configuration.read_toml_here(), **launch}
    stages, micro_batches = said.get("stages", 1), said.get("micro_batches", 0)
    if stages and not (stages > 1 and micro_batches == "auto"):
        return {}
    settle_here({**launch, "stages": stages or 1})  # what is wrong besides is said at once
    workers = _num_workers(said, stages)
    command = [sys.executable, "-m", "syncline", "plan-stages", "--json", "-w", str(workers)]
    command += ["--stages", str(stages or "auto"), "--micro-batches", str(micro_batches or "auto")]
    command += ["--schedule", str(said.get("schedule", "1f1b"))]
    memory = bytes_for_each(workers)
    command += ["--memory", str(memory)] if memory else []
    command += [*(["-m"] if script.is_module else []), script.path, *script.arguments]
    sys.stdout.write(f"syncline: plans the stages: runs {script.path} up to its first batch\n")
    sys.stdout.flush()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ConfigError(
            f"--stages {stages or 'auto'}: there is no plan, for the reason above; or give numbers, e.g. --stages 2 "
            "--micro-batches 8"
        )
    from syncline.core.pipelining.planning import Plan  # loads NumPy, which no other launch needs

    plan = msgspec.convert(msgspec.json.decode(done.stdout)["plan"], Plan)
    pipelines = f"pipelines of {counted(plan.num_workers, 'stage')}"
    batches = counted(plan.micro_batches, "micro-batch").replace("batchs", "batches")
    sys.stdout.write(f"syncline: planned: {pipelines}, {batches} each: {plan.reason}\n")
    sys.stdout.flush()
    return {"stages": plan.num_workers, "micro_batches": plan.micro_batches}


def _num_workers(said: Mapping[str, Any], stages: int) -> int:
    """So many workers make whole pipelines on every host, whatever number of stages divides them."""
    numbers = [int(said.get(name, 0)) for name in ("workers", "least_workers", "most_workers")]
    numbers += [count for _, count in parse_hosts(str(said["hosts"]))] if said.get("hosts") else []
    found = math.gcd(*numbers)
    if found > 1 or stages > 1:
        return max(found, stages)
    raise ConfigError("--stages auto: say how many processes there are, e.g. -w 4")
