"""Why SIGKILL came: only the kernel's counters say that memory ran out."""

from __future__ import annotations

import os
import pathlib

import pytest

from syncline.launch.oom import OomKills, oom_kills


class Machine:
    """The files of a kernel."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"

    def write(self, path: str, text: str) -> None:
        file = self.proc.parent / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def kills(self, pid: int = 7) -> int:
        return oom_kills(pid, self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    found = Machine(tmp_path)
    found.write("proc/vmstat", "nr_free_pages 9\noom_kill 40\npgfault 8\n")
    return found


def test_the_group_of_the_process_is_asked_before_the_machine(machine: Machine) -> None:
    machine.write("proc/7/cgroup", "0::/user.slice/job\n")
    machine.write("cgroup/user.slice/memory.events", "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 1\n")
    assert machine.kills() == 3, "memory is not counted in the group itself, but in the one around it"
    machine.write("cgroup/user.slice/job/memory.events", "max 9\noom 4\noom_kill 2\n")
    assert machine.kills() == 2


def test_the_first_version_of_groups(machine: Machine) -> None:
    machine.write("proc/7/cgroup", "5:cpu,cpuacct:/a\n4:memory:/docker/abc\n1:name=systemd:/a\n0::/a\n")
    machine.write("cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 6\n")
    assert machine.kills() == 6, "a container sees its own group as the root"


def test_without_groups_the_machine_counts_and_without_a_kernel_nothing_does(machine: Machine) -> None:
    assert machine.kills() == 40
    machine.write("proc/7/cgroup", "0::/\n")
    assert machine.kills() == 40
    assert oom_kills(7, machine.proc / "none", machine.cgroups) == 0
    assert oom_kills(os.getpid()) >= 0


def test_a_kill_explains_one_death_of_a_process_that_was_there() -> None:
    count = 5
    kills = OomKills(lambda pid: count)
    first, second = kills.at_start(1), kills.at_start(2)
    assert not kills.explains(1, first), "somebody else has killed it"
    count = 6
    third = kills.at_start(3)
    assert kills.explains(1, first) and not kills.explains(2, second) and not kills.explains(3, third)
    count = 8
    assert kills.explains(2, second) and kills.explains(3, third) and not kills.explains(1, first)
