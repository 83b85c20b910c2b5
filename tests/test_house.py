"""The rules of the house that a reviewer would otherwise have to remember (see CONTRIBUTING.md)."""

import ast
import functools
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.sim.bugs import BUGS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "syncline"

BANNED_FILE_WORDS = {"util", "utils", "helper", "helpers", "manager", "managers"}

# Each of these turns bytes into running code.
BANNED_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BANNED_BUILTINS = {"eval", "exec"}
BANNED_FUNCTIONS = {
    "builtins.eval",
    "builtins.exec",
    "torch.load",
    "torch.hub.load",
    "torch.jit.load",
    "torch.serialization.load",
}

# Files that may touch os.environ, relative to src/syncline. config.py reads it; a file of launch/ may be
# added here only to hand an environment on to a child process.
ENVIRONMENT_FILES = {"config.py"}
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_files() -> list[Path]:
    return [path for folder in ("src", "tests", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def project_files() -> list[Path]:
    """What git has or would take; outside a checkout, whatever is not hidden."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = shutil.which("git") and subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed and listed.returncode == 0:
        paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    else:
        hidden = ("__pycache__", "runs", "build", "dist")
        inside = (path.relative_to(ROOT).parts for path in ROOT.rglob("*"))
        paths = [ROOT.joinpath(*p) for p in inside if p[0][0] != "." and not set(p) & set(hidden)]
    return [path for path in paths if path.is_file()]


def foreign_names(tree: ast.AST) -> dict[str, str]:
    """Local name -> origin, for every import of a file: `from torch import load as l` is l -> torch.load."""
    names = {}
    for node in walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                origin = alias.name if alias.asname else alias.name.split(".")[0]
                names[alias.asname or origin] = origin
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`torch.load` for the expression torch.load, however it was imported; '' where it is no chain."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def banned_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    names = foreign_names(tree)
    for node in walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in BANNED_MODULES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in BANNED_MODULES:
                yield node.lineno, f"from {module} import"
            for alias in node.names:
                if f"{module}.{alias.name}" in BANNED_FUNCTIONS:
                    yield node.lineno, f"from {module} import {alias.name}"
        elif isinstance(node, ast.Name) and node.id in BANNED_BUILTINS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and dotted(node, names) in BANNED_FUNCTIONS:
            yield node.lineno, dotted(node, names)
        elif isinstance(node, ast.Call):
            name = dotted(node.func, names)
            first = getattr(node.args[0], "value", None) if node.args else None
            imports = name in {"importlib.import_module", "__import__"}
            if imports and str(first).split(".")[0] in BANNED_MODULES:
                yield node.lineno, f"{name}({first!r})"
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) is not False:
                    yield node.lineno, "allow_pickle"


def environment_reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    names = foreign_names(tree)
    banned = {f"os.{name}" for name in ENVIRONMENT_NAMES}
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ENVIRONMENT_NAMES:
                    yield node.lineno, f"from os import {alias.name}"
        elif isinstance(node, ast.Attribute) and dotted(node, names) in banned:
            yield node.lineno, dotted(node, names)


def given_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names this file gives to things itself; what others named (platform.node) is theirs."""
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if alias.asname:
                    yield node.lineno, alias.asname
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name


def words_of(name: str) -> set[str]:
    """`NodeManager`, `node_manager` and `NODE_MANAGER` are the words node and manager."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    spaced = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", spaced)
    words = {word.lower() for word in re.split(r"[^A-Za-z]+", spaced) if word}
    return words | {word.removesuffix("s") for word in words}


def unused_words() -> set[str]:
    """The glossary's own list; a row with a comma bans one meaning only, which a machine cannot see."""
    table = (ROOT / "docs" / "glossary.md").read_text().split("## Not used", 1)[1]
    cells = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)
    words = {cell for cell in cells if re.fullmatch(r"[a-z]+", cell)}
    return words | {word.removesuffix("s") for word in words}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def walk(tree: ast.AST) -> Iterable[ast.AST]:
    """Like ast.walk; the nodes of a whole file are listed once."""
    return _nodes_of(tree) if isinstance(tree, ast.Module) else ast.walk(tree)


@functools.cache
def _nodes_of(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def findings(finder, paths: Iterable[Path]) -> list[str]:
    return [f"{relative(path)}:{line}: {what}" for path in paths for line, what in finder(parsed(path))]


@pytest.fixture(autouse=True, scope="module")
def forgetting():
    """The trees are millions of objects, which the garbage collector would look through in every later test."""
    yield
    parsed.cache_clear()
    _nodes_of.cache_clear()


def test_file_names_say_what_is_inside():
    vague = [relative(p) for p in python_files() if words_of(p.stem) & BANNED_FILE_WORDS]
    folders = [relative(p) for p in PACKAGE.rglob("*") if p.is_dir() and words_of(p.name) & BANNED_FILE_WORDS]
    assert not vague + folders


def test_nothing_that_runs_foreign_bytes():
    assert len(SOURCES) > 100 and not findings(banned_calls, SOURCES)


def test_only_config_reads_the_environment():
    others = [path for path in SOURCES if path.relative_to(PACKAGE).as_posix() not in ENVIRONMENT_FILES]
    assert not findings(environment_reads, others)


def test_words_that_are_not_used():
    banned = unused_words()
    assert {"master", "slave", "node", "manager", "helper", "util", "van"} <= banned
    for path in SOURCES:
        given = list(given_names(parsed(path)))
        bad = [f"{relative(path)}:{line}: {name}" for line, name in given if words_of(name) & banned]
        assert not bad, f"see docs/glossary.md: {bad}"
        if path.stem == "membership":
            assert not [name for _, name in given if "epoch" in words_of(name)], "a membership has a generation"


# Built from parts, so that this file does not hold what it looks for.
PRIVATE = "|".join(
    [
        r"(?<![\w.})/])/(?:" + "|".join(["ro" + "ot", "wo" + "rk"]) + r")(?:/|\b(?=[\"'`\s]))",
        "/opt/" + "(?:wheels|py" + "pi)",
        r"\bpy" + r"pi\.(?:org|python\.org)",
        "python" + r"hosted\.org",
        r"download\.py" + r"torch\.org",
        r"bootstrap\.py" + r"pa\.io",
        r"(?:repo|conda)\.ana" + r"conda\.(?:com|org)",
    ]
)


def test_no_path_of_a_machine_and_no_registry_is_named():
    private = re.compile(PRIVATE)
    found = []
    for path in project_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := private.search(line):
                found.append(f"{relative(path)}:{number}: {match.group()}")
    assert not found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "eval('1')",
        "f = exec",
        "from torch import load",
        "import torch as t; t.load('x')",
        "import torch.serialization as s; s.load('x')",
        "import numpy as np; np.load('x', allow_pickle=True)",
        "import importlib; importlib.import_module('dill')",
    ],
)
def test_the_ban_on_running_bytes_sees(text):
    assert list(banned_calls(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    ["model.eval()", "state.load('x')", "import json; json.load(f)", "np.load('x', allow_pickle=False)"],
)
def test_the_ban_on_running_bytes_leaves(text):
    assert not list(banned_calls(ast.parse(text)))


@pytest.mark.parametrize(
    "text", ["import os; os.environ['A']", "from os import getenv", "import os as o; o.getenv('A')"]
)
def test_the_ban_on_the_environment_sees(text):
    assert list(environment_reads(ast.parse(text)))


def test_the_design_names_every_module():
    """Of the packages that its list of the house goes through; a name may stand for the same one elsewhere."""
    text = (ROOT / "docs" / "internals" / "design.md").read_text()
    listed = set(re.findall(r"\w+", text.partition("\nsrc/syncline/\n")[2].partition("```")[0]))
    whole = ("testing",)  # named as a whole
    modules = [path for path in SOURCES if path.relative_to(PACKAGE).parts[0] not in whole]
    assert [relative(path) for path in modules if path.stem.strip("_") not in {*listed, "init"}] == []


def test_the_page_on_reliability_counts_the_planted_bugs():
    text = (ROOT / "docs" / "internals" / "reliability.md").read_text()
    assert re.findall(r"(\d+) planted bugs", text) == [str(len(BUGS))]


@pytest.mark.parametrize("name", ["NodeState", "old_master", "UTILS", "IOManager", "num_nodes", "van"])
def test_the_ban_on_words_sees(name):
    assert words_of(name) & unused_words()


@pytest.mark.parametrize("name", ["contextmanager", "advance", "nodename", "relevant", "chief"])
def test_the_ban_on_words_leaves(name):
    assert not words_of(name) & unused_words()


@pytest.mark.parametrize("line", ["see /" + "work/x", "'/ro" + "ot/.cache'", "https://py" + "pi.org/simple"])
def test_the_ban_on_private_places_sees(line):
    assert re.search(PRIVATE, line)


@pytest.mark.parametrize("line", ["runs/NAME/work/x", "{folder}/work/", "../work/", "PyPI"])
def test_the_ban_on_private_places_leaves(line):
    assert not re.search(PRIVATE, line)


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of ours that this file imports anywhere, also for types only."""
    found = set()
    for node in walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules.keys()


def strongly_connected(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that all reach each other (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            place = stack.index(node)
            found.append(sorted(stack[place:]))
            del stack[place:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_no_import_cycle_of_more_than_three_files():
    """Also through imports for types only: a reader follows those too."""
    modules = {}
    for path in SOURCES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: imports_of(path, modules) - {name, "syncline"} for name, path in modules.items()}
    assert [group for group in strongly_connected(graph) if len(group) > 3] == []


def private_definitions(tree: ast.AST) -> set[str]:
    """Private names of attributes, methods and globals that a file defines."""
    found = set()
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(node.attr)  # a base class may define it
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_no_class_reaches_into_the_private_state_of_a_class_in_another_file():
    by_file = {path: private_definitions(parsed(path)) for path in SOURCES}
    ours = set().union(*by_file.values())
    found = []
    for path in SOURCES:
        for node in walk(parsed(path)):
            if not isinstance(node, ast.Attribute) or node.attr not in ours - by_file[path]:
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.append(f"{relative(path)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def assigned_to_self(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Attributes that methods give to their object, with what is given; also the fields of a class."""
    for node in walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, ast.Assign | ast.AnnAssign) else ():
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr, node.value
            elif isinstance(target, ast.Name):
                yield target.id, node.value


def test_no_callback_is_patched_into_an_object_from_outside():
    """What is called back is given to the constructor, or through a method that says what for."""
    assigned = [pair for path in SOURCES for pair in assigned_to_self(parsed(path))]
    slots = {name for name, value in assigned if isinstance(value, ast.Lambda)}
    slots -= {name for name, value in assigned if not isinstance(value, ast.Lambda)}
    found = []
    for path in SOURCES:
        for node in walk(parsed(path)):
            if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in slots):
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                found.append(f"{relative(path)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_no_two_classes_have_the_same_name():
    """Of the package; a private class belongs to its file."""
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(relative(path))
    # Each adapter has its own optimizer, and users of every framework know it by the same name.
    places["DistributedOptimizer"] = [
        path for path in places["DistributedOptimizer"] if path.split("/")[2] not in ("keras", "tensorflow", "torch")
    ]
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


#: Test files that look at private state of the package, each with the reason. Everything else goes through the public
#: face, `syncline.testing` and `debug_state()`.
LOOKS_INSIDE = {
    "coordinator/test_late_registrations.py": "plays a later coordinator, which has not read the manifest yet",
    "launch/played.py": "sends the launcher a signal without one: signals reach the main thread only",
    "launch/test_launcher.py": "waits for states of the launcher between two of its lines, and plays signals",
    "launch/test_ringing.py": "plays the server of a ring worker's process in a double",
    "net/test_rpc.py": "the gap between two steps of a race, and the end of 32-bit numbers",
    "server/test_process_group.py": "stops a process group in the middle of a sum",
    "server/test_ring.py": "holds up the vote of one server",
    "server/test_ring_changes.py": "holds up one server in the middle of a reconfiguration",
    "store/test_journal.py": "SQLite's own settings, locks and a term that goes back",
    "store/test_journal_faults.py": "makes SQLite's connection fail as a disk does",
    "torch/test_early_sums.py": "an overflow of one worker, which only GradScaler brings about",
    "torch/test_script_state.py": "an epoch that is finished before its loop begins",
    "worker/test_copies.py": "drops a push that is under way, as no call does",
}


#: Names that torch has given: modules keep their parameters there, and GradScaler asks optimizers for the other.
NAMES_OF_TORCH = {"_parameters", "_step_supports_amp_scaling"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_members(tree: ast.AST) -> set[str]:
    """Private attributes and methods of the classes in a file."""
    found = set()
    for node in walk(tree):
        if isinstance(node, ast.ClassDef):
            for inner in walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(inner.name)
                elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
                    found |= {inner.attr} if inner.value.id in ("self", "cls") else set()
            found |= {name for statement in node.body for name in targets_of(statement)}
    return {name for name in found if is_private(name)}


def targets_of(statement: ast.stmt) -> set[str]:
    """Names that a statement gives a value to."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return set()
    return {n.id for n in walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def private_globals(tree: ast.Module) -> set[str]:
    named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return {name for name in named.union(*map(targets_of, tree.body)) if is_private(name)}


def reaches_inside(tree: ast.Module, ours: set[str]) -> Iterator[tuple[int, str]]:
    """Where a test uses a private name of the package: as an attribute, by an import, or patched as a string.

    What the file's own classes call the same is theirs; so are `self._x` and `super()._x` of a subclass, and what
    other packages keep in a module.
    """
    foreign, origins = ours - private_members(tree), foreign_names(tree)

    def is_elsewhere(node: ast.AST) -> bool:
        origin = origins.get(node.id, "syncline") if isinstance(node, ast.Name) else "syncline"
        return origin.partition(".")[0] not in ("syncline", "tests")

    for node in walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in foreign:
            base = node.value.func if isinstance(node.value, ast.Call) else node.value
            is_own = isinstance(base, ast.Name) and base.id in ("self", "cls", "super")
            if not is_own and not is_elsewhere(base):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "syncline":
            for alias in node.names:
                if is_private(alias.name):
                    yield node.lineno, f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("setattr", "delattr", "getattr", "pop") and not (node.args and is_elsewhere(node.args[0])):
                for given in node.args[:2]:
                    name = str(getattr(given, "value", "")).rpartition(".")[2]
                    if is_private(name) and name in ours:
                        yield node.lineno, f"{called}({name!r})"


def test_few_tests_look_at_private_state():
    """A test that is bound to the inside breaks with every change of it, right or wrong."""
    trees = [parsed(path) for path in SOURCES]
    ours = set().union(*map(private_members, trees), *map(private_globals, trees))
    found, ours = {}, ours - NAMES_OF_TORCH
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if reaches := list(reaches_inside(parsed(path), ours)):
            found[path.relative_to(ROOT / "tests").as_posix()] = reaches
    assert {name: reaches for name, reaches in found.items() if name not in LOOKS_INSIDE} == {}
    assert sorted(LOOKS_INSIDE.keys() - found.keys()) == [], "take these off the list: they do not look inside"
    assert len(LOOKS_INSIDE) <= 20 and all(LOOKS_INSIDE.values())


@pytest.mark.parametrize(
    "text",
    [
        "job._hidden",
        "job.part._hidden = 1",
        "from syncline.a import _anything",
        "monkeypatch.setattr(job, '_hidden', 1)",
        "monkeypatch.setattr('syncline.a._hidden', 1)",
        "class Own:\n    def go(self): return self.job._hidden",
    ],
)
def test_the_search_for_private_state_sees(text):
    assert list(reaches_inside(ast.parse(text), {"_hidden"}))


@pytest.mark.parametrize(
    "text",
    [
        "sys._getframe()",
        "from elsewhere import part\npart._hidden",
        "import elsewhere\nmonkeypatch.setattr(elsewhere, '_hidden', 1)",
        "self._hidden",
        "name.strip('_hidden')",
        "class Own:\n    def _hidden(self): pass\nOwn()._hidden()",
    ],
)
def test_the_search_for_private_state_leaves(text):
    assert not list(reaches_inside(ast.parse(text), {"_hidden"}))
