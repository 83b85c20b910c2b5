"""A codec of the user's own: where it is found, and what is said before anything starts where it is not."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import pytest
from tests.launch.played import FILE

from syncline.config import JobConfig
from syncline.core.members import Member
from syncline.core.wire.control import Joined
from syncline.errors import ConfigError
from syncline.launch.own_codecs import check_own_codecs
from syncline.launch.serving import End, Serving

MINE = """
    import numpy as np

    class Half:
        name, is_lossy = "half", True

        def bound(self, num_items):
            return 2 * num_items

        def encode(self, values):
            return values.astype(np.float16).view(np.uint8)

        def decode(self, data, out):
            out[:] = data.view(np.float16)

    half = Half()
"""

SCRIPT = """
    import numpy as np, syncline
    job = syncline.init()
    job.kv.register({"w": np.zeros(2000, np.float32)}, syncline.Rule("Add"))
    print("has", job.kv.push_pull({"w": np.ones(2000, np.float32)}).wait()["w"][7], flush=True)
"""


def test_one_that_is_beside_the_script_is_found_by_workers_and_servers(commands: Any) -> None:
    """The working folder is another one: neither the launcher nor a server's process has it by itself."""
    (commands.folder / "beside").mkdir()
    commands.script(MINE, "beside/mine_half.py")
    script = commands.script(SCRIPT, "beside/train.py")
    result = commands.run("run", "-w", "1", "-s", "1", "--transport", "tcp", "--codec", "mine_half:half", script)
    assert result.code == 0 and "has 1.0" in result.output, result.output
    assert "pushed       4 KiB over sockets per step, by all workers" in result.output, "it was encoded"


def test_a_module_that_ends_its_process_does_not_end_the_launcher(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_ends.py").write_text("import sys\nprint('said', flush=True)\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match="mine_ends:x: a process that imports this ended with exit code 0"):
        check_own_codecs(JobConfig(codec="mine_ends:x"), "")


def test_what_other_hosts_have_is_not_looked_for_here() -> None:
    """They have files of their own. Where some members are here, it is."""
    check_own_codecs(JobConfig(codec="no.such:name", hosts="a:1,b:1"), "train.py")
    with pytest.raises(ConfigError, match=r"^--codec no\.such:name: ModuleNotFoundError"):
        check_own_codecs(JobConfig(codec="no.such:name", hosts="a:1,localhost:1"), "train.py")


def test_a_server_that_cannot_load_it_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host that nobody could look at: it is in the job by then, and would be waited for."""
    monkeypatch.setattr("syncline.launch.serving.Link", lambda *_, **__: types.SimpleNamespace(close=lambda: None))
    ends: list[End] = []
    serving = Serving(FILE, "server-0", ends.append)
    try:
        me = Member("server-0", "server", 3, "a")
        with pytest.raises(ConfigError):
            serving.hear_joined(Joined(3, 1, [me], JobConfig(codec="no.such:name")))
        (end,) = ends
        assert end.code == 1 and "--codec no.such:name: ModuleNotFoundError" in str(end.error)
    finally:
        serving.close()
