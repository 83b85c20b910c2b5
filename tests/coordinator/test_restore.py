"""Taking up at the coordinator: which checkpoint, what is compared, and slices that were lost; members are played."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from tests.coordinator.played import SECONDS, jobs, until
from tests.coordinator.saves import begun, folder, manifest

from syncline.core.layout import Parameter
from syncline.core.leasing.loader import Loader
from syncline.core.rule import Rule
from syncline.core.slice_state import Copy, life_of
from syncline.core.wire.checkpoints import (
    AskResume,
    GivenResume,
    Resume,
    Save,
)
from syncline.core.wire.control import GiveCopies, Register, Registered
from syncline.core.wire.leases import AskLease, OpenEpoch
from syncline.errors import LayoutError
from syncline.testing import local_job

__all__ = ["folder", "jobs"]


# -- taking up --------------------------------------------------------------------------------------------


def saved_before(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    job["worker-0"].ask(OpenEpoch("train", 0, Loader(40, 4)))
    lease = job["worker-0"].ask(AskLease("train", 0, []))
    for name in ("server-0", "server-1"):
        job[name].acks = [(lease.lease, 0, 4)]
    job["worker-0"].ask(Save())
    job.coordinator.close()


def register(job: Any, name: str = "w", num_items: int = 4096, rule: str = "Add") -> Any:
    options = {"lr": 1.0} if rule == "SGD" else {}
    message = Register(0, [Parameter(name, "float32", (num_items,))], [Rule(rule, **options).spec], "mean")
    return job["worker-0"].ask(message)


def test_a_job_goes_on_from_the_newest_that_its_folder_holds(jobs: Any, folder: pathlib.Path) -> None:
    saved_before(jobs, folder)
    job = jobs(checkpoint=str(folder), save_every="1h", slice_bytes=4096, servers=3).begin()
    answer = register(job)
    assert isinstance(answer, Registered) and answer.upload is None, "the chief is not asked for its values"
    told = [message for k in range(3) for message in job[f"server-{k}"].all(Resume)]
    assert sorted(number for message in told for number in message.slices) == sorted(job.replica_sets())
    assert {message.folder for message in told} == {str(folder / "000001-step-7")}
    assert not any(message.clocks or message.fresh for message in told)
    assert any("resumes from" in line and "step 7, epoch 1, saved" in line for line in job.log), job.log
    state = job.disk.last
    assert state.leases.epochs["train"][0].num_done == 4 and not state.leases.epochs["train"][0].leases
    assert state.saves.lineage == manifest(folder).lineage
    assert job["worker-1"].ask(AskResume()) == GivenResume(str(folder / "000001-step-7"), told[0].digest)


def test_fresh_begins_beside_it(jobs: Any, folder: pathlib.Path) -> None:
    saved_before(jobs, folder)
    job = jobs(checkpoint=str(folder), fresh=True, slice_bytes=4096).begin()
    job.register()
    assert job["worker-0"].ask(AskResume()) == GivenResume()
    assert job.disk.last.saves.lineage != manifest(folder).lineage
    for name in ("server-0", "server-1"):
        job[name].num_updates = 1
    assert job["worker-0"].ask(Save()).name == "000002-step-1"


def test_another_model_is_an_error_that_names_the_remedy(jobs: Any, folder: pathlib.Path) -> None:
    saved_before(jobs, folder)
    job = jobs(checkpoint=str(folder)).begin()
    with pytest.raises(LayoutError, match=r"'w' as float32\[8\].* has float32\[4096\].*--fresh"):
        register(job, num_items=8)
    with pytest.raises(LayoutError, match=r"'v'.*none of that name.*--fresh"):
        register(job, name="v")


def test_another_rule_starts_afresh_and_says_so(jobs: Any, folder: pathlib.Path) -> None:
    saved_before(jobs, folder)
    job = jobs(checkpoint=str(folder), slice_bytes=4096).begin()
    register(job, rule="SGD")
    assert job["server-0"].all(Resume)[0].fresh == [(0, 0)]
    assert any("the rule was Add in the checkpoint and is SGD now" in line for line in job.log)


def test_a_damaged_one_falls_back_to_the_one_before_by_name(jobs: Any, folder: pathlib.Path) -> None:
    saved_before(jobs, folder)
    job = jobs(checkpoint=str(folder), slice_bytes=4096).begin()
    register(job)
    for name in ("server-0", "server-1"):
        job[name].num_updates = 9
    assert job["worker-0"].ask(Save()).name == "000002-step-9"
    job.coordinator.close()
    path = folder / "000002-step-9" / "server-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    job = jobs(checkpoint=str(folder), slice_bytes=4096).begin()
    assert any("000002-step-9" in line and "is skipped" in line for line in job.log), job.log
    assert job.disk.last.saves.resumed_from.name == "000001-step-7"


def test_a_place_without_a_checkpoint_ends_a_job_that_was_to_start_from_it(jobs: Any, tmp_path: pathlib.Path) -> None:
    job = jobs(resume=str(tmp_path / "nothing"))
    until(lambda: job.coordinator.membership.outcome is not None, "it ends")
    assert "there is no checkpoint" in job.coordinator.membership.outcome.reason


def test_a_server_lost_while_it_reads_has_its_slices_read_by_another(jobs: Any, folder: pathlib.Path) -> None:
    saved_before(jobs, folder)
    job = jobs(checkpoint=str(folder), slice_bytes=4096).begin()
    job["server-1"].holds.add(Resume)
    message = Register(0, [Parameter("w", "float32", (4096,))], [Rule("Add").spec], "mean")
    call = job["worker-0"].endpoint.call(message)
    until(lambda: bool(job["server-1"].held), "it reads")
    job.kill("server-1")
    answer = call.wait(SECONDS)
    assert isinstance(answer, Registered) and answer.upload is None
    assert sorted({n for m in job["server-0"].all(Resume) for n in m.slices}) == [0, 1, 2, 3]


# -- one replica ------------------------------------------------------------------------------------------


def lost(jobs: Any, folder: pathlib.Path, version: int, clock: int) -> Any:
    """A job that saved at version 7 and lost a server; its worker's copies are of this version."""
    job = begun(jobs, folder)
    job["worker-0"].ask(Save())
    lives = [life_of(f"worker-{k}", job[f"worker-{k}"].incarnation) for k in range(2)]
    numbers = [number for number, (primary, _) in job.replica_sets().items() if primary == "server-1"]
    job["worker-0"].copies = [Copy(n, version, dict.fromkeys(lives, clock), version) for n in numbers]
    job.kill("server-1")
    until(lambda: any("came back" in line for line in job.log), "they are restored")
    return job


def test_a_lost_slice_comes_back_from_a_checkpoint_that_is_no_older(jobs: Any, folder: pathlib.Path) -> None:
    job = lost(jobs, folder, version=7, clock=7)
    (told,) = job["server-0"].all(Resume)
    assert told.clocks and told.known == [7] * len(told.slices)
    assert not job["worker-0"].all(GiveCopies)
    (line,) = [line for line in job.log if "came back" in line]
    assert "came back from 000001-step-7" in line and "0 acknowledged updates were revoked" in line


def test_a_fresher_copy_is_preferred(jobs: Any, folder: pathlib.Path) -> None:
    job = lost(jobs, folder, version=8, clock=8)
    assert not job["server-0"].all(Resume) and job["worker-0"].all(GiveCopies)


def test_a_commit_that_its_worker_was_told_of_is_never_missing(jobs: Any, folder: pathlib.Path) -> None:
    """A void commit advances the clock and no version: the next one would find a gap."""
    job = lost(jobs, folder, version=7, clock=8)
    assert not job["server-0"].all(Resume) and job["worker-0"].all(GiveCopies)


def test_a_damaged_checkpoint_brings_nothing_back(jobs: Any, folder: pathlib.Path) -> None:
    job = begun(jobs, folder)
    job["worker-0"].ask(Save())
    (folder / "000001-step-7" / "manifest.json").write_text("{}")
    job["worker-0"].copies = [Copy(n, 6, {}, 7) for n in job.replica_sets()]
    job.kill("server-1")
    until(lambda: any("came back from the copy of worker-0" in line for line in job.log), "from the copy")
    assert any("cannot bring back what was lost" in line for line in job.log)


def test_as_many_versions_of_other_slices_are_other_ones(tmp_path: pathlib.Path) -> None:
    """Two slices that have had three updates each, then one that has had six: it is saved."""

    def work(job: Any) -> str:
        job.kv.register({"x": np.zeros(32, np.float32)}, Rule("Add"), reduce="sum")
        for _ in range(3):
            job.kv.push({"x": np.ones(32, np.float32)}).wait()
        return str(job.save())

    saved = []
    for servers, slice_bytes in ((2, 64), (1, 1 << 20)):
        settings = {"checkpoint": str(tmp_path), "save_every": "1h", "slice_bytes": slice_bytes}
        with local_job(workers=1, servers=servers, **settings) as jobs:
            saved += jobs.run(work)
    assert saved == ["000001-step-3", "000002-step-6"]
