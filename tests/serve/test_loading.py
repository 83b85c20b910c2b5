"""Which version a server brings in, and which one goes on when another fails."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.patience import PATIENCE
from tests.serve.arrays import INPUTS, ROW, Linear
from tests.serve.saved import Caller, arrays, save

from syncline.errors import ConfigError, StoreError
from syncline.serve import Server
from syncline.serve.control import ControlRequest
from syncline.store import checkpoints
from syncline.store.folders import open_folder

#: `validate` waits for it.
may_validate = threading.Event()
may_validate.set()


def validate(predict: Callable[[Any], Any]) -> dict[str, float]:
    assert may_validate.wait(PATIENCE)
    return {"accuracy": float(predict([ROW])[0][0])}


class Model(Linear):
    """Counts how often one is made, and fails while it should."""

    num_made = 0
    fails = False

    def __init__(self) -> None:
        super().__init__()
        Model.num_made += 1
        if Model.fails:
            raise MemoryError("too large")


@pytest.fixture
def served(tmp_path: pathlib.Path) -> Iterator[Callable[..., Any]]:
    """Starts servers that look for versions when they are asked to."""
    servers = []

    def start(weights: Any, **settings: Any) -> Any:
        given = {"port": 0, "refresh": 0.0, "runs": str(tmp_path / "runs"), "inputs": INPUTS, **settings}
        server = Server(Model, weights, **given).start()
        servers.append(server)
        return server

    Model.fails = False
    yield start
    may_validate.set()
    while servers:
        servers.pop().close()


def load(server: Any) -> str:
    """The version that answers then."""
    return str(server.control(ControlRequest("load"))["current"])


def damage(folder: pathlib.Path) -> None:
    (folder / "server-0.safetensors").write_bytes(b"")


@pytest.mark.parametrize("how", ["damaged", "below the guard", "points nowhere", "torn pointer"])
def test_a_refused_best_keeps_the_old_version(served: Any, tmp_path: pathlib.Path, how: str) -> None:
    """The newest checkpoint was never marked as best: it must not answer because the best one is damaged."""
    saves = tmp_path / "saves"
    save(saves, 5, best=True)
    server = served(saves, guard="accuracy>=20")
    assert server.version == "5"
    save(saves, 6)
    name = save(saves, 7, arrays(7, 1.0) if how == "below the guard" else None, best=True)
    if how == "damaged":
        damage(saves / name)
    elif how == "points nowhere":
        checkpoints.point(open_folder(saves), "best", "000009-step-90")
    elif how == "torn pointer":
        (saves / "best").write_bytes(b"{")
    if how in ("damaged", "below the guard"):
        with pytest.raises(ConfigError, match="version 7 is refused"):
            load(server)
    assert load(server) == load(server) == "5"
    trouble = server.standing()["trouble"]
    assert bool(trouble) == (how in ("points nowhere", "torn pointer")) and ("best" in trouble or not trouble)
    with Caller(server.url) as call:
        assert call.post("/predict", {"input": ROW})[1]["model_version"] == "5"
    save(saves, 8, best=True)
    assert load(server) == "8" and server.standing()["trouble"] == ""


def test_at_the_start_the_newest_stands_in_for_a_damaged_best(served: Any, tmp_path: pathlib.Path) -> None:
    """It goes on until a new best comes: versions must not change by what was never marked as best."""
    saves = tmp_path / "saves"
    save(saves, 1)
    damage(saves / save(saves, 2, best=True))
    save(saves, 3)
    server = served(saves)
    assert server.version == "3"
    save(saves, 4)
    assert load(server) == "3"
    save(saves, 5, best=True)
    assert load(server) == "5"


def test_a_version_that_fails_for_another_reason_is_tried_twice(served: Any, tmp_path: pathlib.Path) -> None:
    """A lack of memory may pass, so the first failure refuses nothing. But reading the whole checkpoint at each
    refresh, for ever, would cost more than it brings.
    """
    saves = tmp_path / "saves"
    save(saves, 1)
    server = served(saves, pick="last")
    save(saves, 2)
    for words in ("version 2 cannot be loaded, and is tried once more: .*too large", "version 2 is refused: .*too"):
        Model.fails = True
        with pytest.raises(ConfigError, match=words):
            load(server)
    num_made = Model.num_made
    assert load(server) == "1" and Model.num_made == num_made
    Model.fails = False
    save(saves, 3)
    assert load(server) == "3"
    save(saves, 4)
    Model.fails = True
    with pytest.raises(ConfigError, match="tried once more"):
        load(server)
    Model.fails = False
    assert load(server) == "4"  # it passed


def test_a_trial_that_hangs_refuses_its_version_and_no_other(served: Any, tmp_path: pathlib.Path) -> None:
    """Nothing ends the operator's `validate`, but later versions do not wait for it."""
    saves = tmp_path / "saves"
    save(saves, 1)
    may_validate.set()
    server = served(saves, pick="last", guard="accuracy>=1", trial_seconds=3.0)
    save(saves, 2)
    may_validate.clear()
    with pytest.raises(ConfigError, match=r"version 2 is refused: the trial of .* did not end within 3 s"):
        load(server)
    save(saves, 3)
    with pytest.raises(ConfigError, match="version 3 is refused"):  # it was tried, while the other trial hangs
        load(server)
    assert server.version == "1"


def test_the_first_version_is_loaded_in_time_too(served: Any, tmp_path: pathlib.Path) -> None:
    saves = tmp_path / "saves"
    save(saves, 1)
    may_validate.clear()
    with pytest.raises(StoreError, match="did not end within"):
        served(saves, guard="accuracy>=1", trial_seconds=0.05)
    may_validate.set()
    assert np.isfinite(served(saves, name="other", guard="accuracy>=1").standing()["share"])
