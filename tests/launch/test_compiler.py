"""torch's compiler is loaded by scripts that compile, and by nobody else."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
import types

import pytest
import torch
from tests.patience import JOB_PATIENCE, PATIENT_TOML

from syncline.launch.compiler import leave_out_the_compiler

SCRIPT = """
    import sys, torch, syncline
    from syncline.torch import DistributedOptimizer
    job = syncline.init()
    model = torch.nn.Linear(4, 2)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(job.step, "torch._dynamo" in sys.modules, model.weight.grad)
    model(torch.ones(1, 4)).sum().backward()
    torch.compile(optimizer.zero_grad, backend="eager")()
    optimizer.zero_grad()
    marked = torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable
    print(model.weight.grad, getattr(marked, "_torchdynamo_disable", False))
"""


@pytest.mark.proof
def test_a_script_that_trains_does_not_load_it_and_one_that_compiles_does() -> None:
    """Worker and server are in one process here; what torch marks is marked as ever once the compiler is there."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=JOB_PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 False None", "None True"]


STATE_SCRIPT = """
    import sys, torch, syncline
    from syncline.torch import DistributedOptimizer
    job = syncline.init()
    model = torch.nn.Linear(4, 2)
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    before = set(sys.modules)
    for some in (plain, optimizer):
        some.load_state_dict(some.state_dict())
    print("LOADED", sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("command", [[], ["-m", "syncline", "run", "-w", "1"]], ids=["embedded", "run"])
def test_the_state_of_an_optimizer_loads_no_modules(command: list[str], tmp_path: pathlib.Path) -> None:
    """The first `state_dict()` loaded 818 of them, which took seconds in the middle of training."""
    (tmp_path / "train.py").write_text(textwrap.dedent(STATE_SCRIPT))
    (tmp_path / "syncline.toml").write_text(PATIENT_TOML)
    words = [sys.executable, *command, "train.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=JOB_PATIENCE, cwd=tmp_path)
    assert done.returncode == 0 and "LOADED []" in done.stdout.splitlines(), done.stdout + done.stderr


def test_where_it_is_loaded_already_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.optim.Optimizer.add_param_group.__wrapped__
    monkeypatch.delattr(plain, "__dynamo_disable", raising=False)
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    leave_out_the_compiler()
    assert not hasattr(plain, "__dynamo_disable")
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    leave_out_the_compiler()
    assert hasattr(plain, "__dynamo_disable"), "else nothing was looked at"


def test_once_it_is_loaded_it_marks_what_it_always_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/launch/test_embedded.py has a script that trains without it."""
    plain, compiler = torch.optim.Optimizer.zero_grad.__wrapped__, types.ModuleType("torch._dynamo")
    monkeypatch.delattr(plain, "__dynamo_disable", raising=False)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    leave_out_the_compiler()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.zero_grad()
    ours = getattr(plain, "__dynamo_disable")
    assert "torch._dynamo" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch._dynamo", compiler)
    made: list[object] = []
    setattr(compiler, "disable", lambda function, recursive, wrapping: made.append(function) or function)  # noqa: B010
    model.weight.grad = torch.ones(1, 2)
    optimizer.zero_grad()
    assert made == [plain] and model.weight.grad is None
    assert getattr(plain, "__dynamo_disable") is plain is not ours
