"""The commands a newcomer types first: they exist, they say what they do, and they do nothing twice."""

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
TARGETS = [
    "help",
    "setup",
    "data",
    "train",
    "test",
    "check",
    "proof",
    "soak",
    "bench",
    "bench-check",
    "lint",
    "docs",
    "clean",
]
FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def clean_environment(**more: str) -> dict[str, str]:
    """Without what an outer `make test` leaves for an inner make."""
    left_out = re.compile(r"MAKE|(MFLAGS|ARGS|BASE|ROWS|PYTHON)$")
    return {name: value for name, value in os.environ.items() if not left_out.match(name)} | more


def run(*command: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def make_n(target: str, *more: str) -> list[str]:
    done = run("make", "--no-print-directory", "-n", target, *more)
    assert done.returncode == 0, done.stderr
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


@pytest.mark.parametrize("target", TARGETS)
def test_target_exists(target):
    assert make_n(target)


def test_help_names_every_target():
    done = run("make", "--no-print-directory", "help")
    listed = re.findall(r"^\s*make ([\w-]+) +\S", done.stdout, re.MULTILINE)
    assert sorted(listed) == sorted(TARGETS)


def test_every_make_command_of_the_docs_exists():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    text = "\n".join(page.read_text() for page in pages)
    code = [*re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL), *re.findall(r"`[^`\n]+`", text)]
    named = set(re.findall(r"^`?make ([a-z-]+)", "\n".join(code), re.MULTILINE))
    assert {"train", "test"} <= named
    assert named <= set(TARGETS)


def test_readme_opens_with_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    first = readme.split("```")[1]
    assert re.findall(r"^make \w+", first, re.MULTILINE) == ["make train", "make test"]


def test_train_is_setup_data_and_the_example():
    lines = make_n("train")
    assert "tools/setup.sh" in lines[0]
    assert "tools/fetch_data.sh" in lines[1]
    assert lines[-1].endswith("syncline run -w 2 -s 1 examples/fashion_mnist.py --epochs 3")


def test_pytest_has_the_last_word():
    lines = make_n("test", "ARGS=-k placement")
    assert "-m pytest -q" in lines[-1] and lines[-1].endswith(" -k placement")
    text = "\n".join(lines)
    for tool in (
        "setup.sh",
        "fetch_data.sh",
        "ruff check",
        "ruff format --check",
        "mypy",
        "lint-imports",
        "mkdocs build",
    ):
        assert tool in text


def test_bench_check_names_the_commit_and_the_rows():
    line = make_n("bench-check", "BASE=main", "ROWS=sync-2 ring-*", "ARGS=--quick")[-1]
    assert line.endswith('python -m benchmarks.check main --only "sync-2" --only "ring-*" --quick')


def test_ci_runs_the_test_command_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert run("bash", "-n", str(script)).returncode == 0
    assert "set -euo pipefail" in script.read_text()
    assert script.read_text().rstrip().endswith("exec make test")


@pytest.mark.parametrize("path", sorted((ROOT / "tools").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(path):
    assert run("sh", "-n", str(path)).returncode == 0


@pytest.fixture
def tree(tmp_path):
    """A tree with an environment already made by a stand-in python that notes what it is asked to do."""
    home = tmp_path / "a tree"
    (home / "tools").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tools/setup.sh", "tools/apt_download.sh"):
        shutil.copy(ROOT / name, home / name)
    executable(home / ".venv" / "bin" / "python", 'echo "$@" >>calls')
    done = run("make", "setup", cwd=home)
    assert done.returncode == 0, done.stderr
    assert "pip install" in (home / "calls").read_text()
    (home / "calls").unlink()
    return home


def test_setup_does_nothing_when_nothing_changed(tree):
    (tree / "pyproject.toml").touch()
    done = run("make", "--no-print-directory", "setup", cwd=tree)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tree / "calls").exists()


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_setup_installs_again_when_a_file_changed(tree, name):
    (tree / name).write_text((tree / name).read_text() + "# changed\n")
    assert run("make", "setup", cwd=tree).returncode == 0
    assert "pip install" in (tree / "calls").read_text()


def test_an_install_that_failed_is_repeated(tree):
    """The stamp of the last good install must not vouch for one that was cut short."""
    (tree / "constraints.txt").write_text("numpy\n")
    executable(tree / ".venv" / "bin" / "python", 'echo "$@" >>calls; case "$*" in *install*) exit 1;; esac')
    assert run("make", "setup", cwd=tree).returncode != 0
    (tree / "calls").unlink()
    shutil.copy(ROOT / "constraints.txt", tree / "constraints.txt")
    run("make", "setup", cwd=tree)
    assert "pip install" in (tree / "calls").read_text()


def test_setup_says_which_python_it_needs(tree):
    shutil.rmtree(tree / ".venv")
    executable(tree / "bin" / "python2.7", "exit 1")
    done = run("make", "setup", "PYTHON=bin/python2.7", cwd=tree)
    assert done.returncode != 0
    assert "3.11 or newer" in done.stderr
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        executable(tree / "bin" / name, 'case "$*" in --version) echo Python 3.9.2;; *) exit 1;; esac')
    done = run("make", "setup", cwd=tree, PATH=f"{tree / 'bin'}:{os.environ['PATH']}")
    assert done.returncode != 0
    assert "3.11 or newer is needed; found: Python 3.9.2" in done.stderr


def test_setup_takes_a_newer_python_where_python3_is_old(tree):
    shutil.rmtree(tree / ".venv")
    executable(tree / "bin" / "python3", "exit 1")
    new = '[ "$2" = venv ] && { mkdir -p .venv/bin; cp "$0" .venv/bin/python; }; echo "$0 $*" >>calls'
    executable(tree / "bin" / "python3.13", "exit 127")
    executable(tree / "bin" / "python3.12", new)
    done = run("make", "setup", cwd=tree, PATH=f"{tree / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    calls = (tree / "calls").read_text()
    assert "python3.12 -m venv" in calls
    assert "python -m pip install" in calls


@pytest.fixture
def no_apt(tmp_path):
    """A PATH whose apt-get only notes that it was asked."""
    executable(tmp_path / "bin" / "apt-get", f'echo "$@" >>"{tmp_path}/asked"; exit 1')
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("place", ["named", "cache/syncline/fashion-mnist"])
def test_data_that_is_there_is_not_fetched(tmp_path, no_apt, place, ending):
    folder = tmp_path / place
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / (name + ending)).write_text("x")
    done = run("sh", "tools/fetch_data.sh", **no_apt, SYNCLINE_DATA=str(tmp_path / "named"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "asked").exists()


def test_data_that_does_not_come_is_left_to_the_reader(tmp_path, no_apt):
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    script = tmp_path / "tools" / "fetch_data.sh"
    script.write_text(script.read_text().replace("/usr/share/datasets", str(tmp_path / "nowhere")))
    done = run("sh", str(script), **no_apt, SYNCLINE_DATA="")
    assert done.returncode == 0
    assert (tmp_path / "asked").exists()
    assert "public download" in done.stderr
    assert not list((tmp_path / "cache" / "syncline").glob("*")), "nothing half done is left"
