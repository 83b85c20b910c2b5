"""A notebook: cells run again and in another order, a cell interrupted, the kernel restarted. In a real kernel."""

from __future__ import annotations

import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE

jupyter_client = pytest.importorskip("jupyter_client", reason="ipykernel is not installed: make setup")
pytestmark = pytest.mark.slow

# The client has an event loop for the life of this process: it is made here, and so it is not left behind by a test.
pytest.importorskip("jupyter_core.utils").ensure_event_loop()

INIT = """
import torch, syncline, time
from torch.nn import functional as F
from syncline.torch import DataLoader, DistributedOptimizer
torch.set_num_threads(1)
job = syncline.init()
"""
DATA = """
torch.manual_seed(0)
x = torch.randn(256, 4)
y = (x.sum(1) > 0).long()
loader = DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32, shuffle=True)
"""
MODEL = "model = torch.nn.Linear(4, 2)"
OPTIMIZER = "opt = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model=model)"
TRAIN = """
seen = steps = 0
for epoch in range(3):
    for a, b in loader:
        opt.zero_grad()
        loss = F.cross_entropy(model(a), b)
        loss.backward()
        opt.step()
        seen, steps = seen + len(a), steps + 1
print(f"seen {seen} in {steps}, loss {loss.item():.3f}")
"""
WELL = re.compile(r"^seen 768 in 24, loss 0\.[0-3]\d\d$", re.MULTILINE)


class Kernel:
    """A kernel in a process of its own; its cells are run one after the other."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._manager = jupyter_client.KernelManager()
        self._manager.start_kernel(cwd=str(folder))
        self._connect()

    def _connect(self) -> None:
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=PATIENCE)

    def run(self, cell: str, *, interrupt_at: str = "") -> str:
        """What the cell writes, with its error. `interrupt_at`: the stop button is pressed when it has this text."""
        number, output = self._client.execute(cell), ""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            message = self._client.get_iopub_msg(timeout=PATIENCE)
            content: dict[str, Any] = message["content"]
            if message["parent_header"].get("msg_id") != number:
                continue
            if message["msg_type"] == "stream":
                output += content["text"]
            elif message["msg_type"] == "execute_result":
                output += content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                output += f"{content['ename']}: {content['evalue']}"
            elif content.get("execution_state") == "idle":
                return output
            if interrupt_at and interrupt_at in output:
                self._manager.interrupt_kernel()
                interrupt_at = ""
        raise TimeoutError(f"the cell has not ended: {cell}\n{output}")

    def run_all(self, *cells: str) -> None:
        """Cells in which nothing may go wrong, and about which nothing is to be said."""
        for cell in cells:
            assert self.run(cell) == ""

    def restart(self) -> None:
        self._client.stop_channels()
        self._manager.restart_kernel(now=True)
        self._connect()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()
        self._manager.context.destroy()


@pytest.fixture
def kernel(tmp_path: pathlib.Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.proof
def test_cells_are_run_again(kernel: Kernel) -> None:
    """Each cell may be run again, also without those behind it; a training goes on, or begins with a new model."""
    kernel.run_all(INIT, "first = job", INIT)
    assert kernel.run("job is first") == "True"
    kernel.run_all(DATA, MODEL, OPTIMIZER)
    assert WELL.search(kernel.run(TRAIN))
    assert WELL.search(kernel.run(TRAIN)), "the training goes on"
    kernel.run_all(OPTIMIZER)
    assert WELL.search(kernel.run(TRAIN)), "an optimizer again for the same model"
    kernel.run_all(OPTIMIZER.replace("0.1", "0.0"), "before = model.weight.clone()")
    assert WELL.search(kernel.run(TRAIN)), "with another learning rate"
    assert kernel.run("torch.equal(model.weight, before)") == "True", "which counts"
    kernel.run_all(MODEL, OPTIMIZER, "before = model.weight.clone()")
    assert kernel.run("round(F.cross_entropy(model(x), y).item(), 1) > 0.3") == "True", "a new model is not trained"
    assert WELL.search(kernel.run(TRAIN))
    kernel.run_all(MODEL.replace("Linear(4, 2)", "Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))"))
    kernel.run_all(OPTIMIZER.replace("Adam", "SGD"))
    assert WELL.search(kernel.run(TRAIN)), "another model and another optimizer"
    kernel.run_all(OPTIMIZER)
    assert WELL.search(kernel.run(TRAIN)), "another optimizer for the same model"
    kernel.run_all("_ = model.load_state_dict({name: 0 * tensor for name, tensor in model.state_dict().items()})")
    kernel.run_all(OPTIMIZER)
    assert kernel.run("model[1].weight.abs().sum().item()") == "0.0", "an optimizer does not change the model"
    kernel.run_all(MODEL, OPTIMIZER)
    kernel.run_all(DATA)
    assert WELL.search(kernel.run(TRAIN)), "another loader over the same data"
    assert kernel.run("a, b = next(iter(loader)); len(a)") == "32", "a look at a batch"
    assert WELL.search(kernel.run(TRAIN))


@pytest.mark.proof
def test_a_cell_that_is_interrupted_is_run_again(kernel: Kernel) -> None:
    kernel.run_all(INIT, DATA, MODEL, OPTIMIZER)
    slow = TRAIN.replace("opt.step()", "opt.step(); print('stepped', flush=True); time.sleep(0.2)")
    assert "KeyboardInterrupt" in kernel.run(slow, interrupt_at="stepped\nstepped\n")
    assert WELL.search(kernel.run(TRAIN))
    assert WELL.search(kernel.run(TRAIN))


@pytest.mark.proof
def test_a_job_is_closed_and_another_one_begun(kernel: Kernel) -> None:
    """Embedded, a process may have one job after the other; what belongs to the old one says so."""
    kernel.run_all(INIT, DATA, MODEL, OPTIMIZER)
    assert WELL.search(kernel.run(TRAIN))
    kernel.run_all("job.close()", "old = job")
    assert "call syncline.init() first" in kernel.run(TRAIN)
    kernel.run_all(INIT)
    assert kernel.run("job is not old and job.step == 0") == "True"
    assert "has left its job" in kernel.run(TRAIN)
    kernel.run_all("before = model.weight.clone()", OPTIMIZER)
    assert kernel.run("torch.equal(model.weight, before)") == "True", "the model goes on as it is"
    assert WELL.search(kernel.run(TRAIN))
    assert kernel.run("job.step") == "24"


def test_the_kernel_is_restarted(kernel: Kernel) -> None:
    kernel.run_all(INIT, DATA, MODEL, OPTIMIZER)
    first = kernel.run(TRAIN)
    kernel.restart()
    assert "NameError" in kernel.run("job")
    kernel.run_all(INIT, DATA, MODEL, OPTIMIZER)
    assert kernel.run("job.step") == "0"
    assert kernel.run(TRAIN) == first, "the same numbers again"
