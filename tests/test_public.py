"""The names that users hold on to: public names, signatures, flags."""

from __future__ import annotations

import inspect
import subprocess
import sys

import syncline
import syncline.testing
import syncline.torch
from syncline.worker.job import Job
from syncline.worker.kv import KeyValue


def test_public_names() -> None:
    assert {"Job", "Rule", "current_job", "init", "Stopped", "SynclineError", "WaitTimeout", "LayoutError"} <= set(
        syncline.__all__
    )
    assert "seed_everything" in syncline.__all__
    assert issubclass(syncline.Stopped, SystemExit) and syncline.Stopped("why").code == 0
    assert all(hasattr(syncline, name) for name in syncline.__all__)
    names = ["DataLoader", "DistributedOptimizer", "Pipeline", "Schedule", "deferred_init", "schedule"]
    assert syncline.torch.__all__ == names
    assert "local_job" in syncline.testing.__all__


def test_the_job_has_its_faces() -> None:
    with syncline.testing.local_job(workers=1) as jobs:
        job = jobs[0]
        assert (job.rank, job.world_size, job.local_rank, job.name, job.generation) == (0, 1, 0, "worker-0", 1)
        assert job.step == 0 and job.is_chief and job.config.policy == "sync" and str(job.device) == "cpu"
        job.barrier("alone")
        assert job.stats().name == job.debug_state().name == "worker-0"
        assert hasattr(Job, "__enter__") and hasattr(Job, "close")


def parameters(function: object) -> list[str]:
    return [str(p).partition(":")[0] for p in inspect.signature(function).parameters.values()]  # type: ignore[arg-type]


def test_signatures() -> None:
    assert parameters(KeyValue.register) == ["self", "params", "rule", "reduce"]
    assert parameters(KeyValue.push) == ["self", "grads", "weight", "**options"]
    assert parameters(KeyValue.set) == ["self", "names", "**options"]
    assert parameters(KeyValue.pull) == ["self", "names", "out", "min_version"]
    assert parameters(KeyValue.push_pull) == ["self", "grads", "out", "weight", "**options"]
    signature = inspect.signature(syncline.torch.DistributedOptimizer.__init__)
    names = list(signature.parameters)
    assert names[:6] == ["self", "opt", "model", "job", "overlap", "clip_norm"]
    assert all(signature.parameters[n].kind is inspect.Parameter.KEYWORD_ONLY for n in names[2:])
    assert syncline.torch.DistributedOptimizer._step_supports_amp_scaling


def test_importing_syncline_does_not_import_torch() -> None:
    """A NumPy or JAX worker never loads it; and the command line starts quickly."""
    code = "import sys, syncline, syncline.cli.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_importing_syncline_does_not_import_an_engine() -> None:
    """Engines are extras: also the modules that start jobs on Ray import it only for a job."""
    names = "syncline, syncline.cli.main, syncline.ray, syncline.cli.ray, syncline.engines.ray_agents"
    code = f"import sys, {names}; print([name for name in ('ray', 'pyarrow') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_current_job_without_one_says_what_to_do() -> None:
    code = "import syncline\ntry:\n syncline.current_job()\nexcept syncline.ConfigError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "there is no job yet; call syncline.init() first"
