"""The rules of the house that a reviewer would otherwise have to remember (see CONTRIBUTING.md)."""

import ast
import functools
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
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


@functools.cache
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


#: Words of our own that known words have replaced. Those that a new thing is rightly called are not here: gate (of
#: `serve`, who may pass), cut (of a model, and for followers), sink (of metrics), mark, contribution, beat.
DEAD_WORDS = {
    "anew", "chance", "circle", "circling", "departure", "deputy", "desk", "doubt", "era",
    "habit", "handing", "hatch", "hearing", "home", "introduction", "landing", "lane", "lend",
    "lender", "letter", "meeting", "neighbour", "parcel", "party", "redo", "relay", "roll",
    "saying", "seat", "stating", "stint", "stretch",
}  # fmt: skip

#: Names with one of these words in another sense.
IN_ANOTHER_SENSE = {
    "lane": "core/tracing.py: a row of the picture of a trace",
    "lanes": "the same",
    "num_lanes": "the same",
    "_worker_lanes": "the same",
    "_server_lanes": "the same",
    "letter": "of a word",
    "MOST_LETTERS": "of a word",
    "Meeting": "launch/rendezvous.py: where ranks of another launcher meet, before there is a job",
    "meeting": "the same",
    "meeting_of": "the same",
    "MEETING": "engines/slurm.py: the same for tasks of a step",
    "meeting_folder": "the same",
}


def dead_names(tree: ast.AST) -> list[str]:
    return [name for _, name in given_names(tree) if words_of(name) & DEAD_WORDS]


def test_words_that_known_words_have_replaced():
    """A reader who knows this field looks for phase and lease queue, not for stretch and desk."""
    names = {relative(path): set(dead_names(parsed(path))) for path in SOURCES}
    found = {path: sorted(dead - IN_ANOTHER_SENSE.keys()) for path, dead in names.items()}
    assert {path: dead for path, dead in found.items() if dead} == {}
    gone = IN_ANOTHER_SENSE.keys() - set().union(*names.values())
    assert sorted(gone) == [], "take these off the list: nothing is called so"


@pytest.mark.parametrize(
    "text", ["def _enter_stretch(): ...", "class Landing: ...", "self._seats = 1", "f = lambda relay: 1"]
)
def test_the_ban_on_replaced_words_sees(text):
    assert dead_names(ast.parse(text))


@pytest.mark.parametrize("text", ["import relay", "seat.take()", "controller = 1", "keras = camera = 1"])
def test_the_ban_on_replaced_words_leaves(text):
    assert not dead_names(ast.parse(text))


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


def unnamed_modules(folder: Path) -> list[str]:
    """Modules of a package folder that its `__init__.py` names neither in its docstring nor in its comments."""
    text = (folder / "__init__.py").read_text()
    comments = [line for line in text.splitlines() if line.startswith("#")]
    named = set(re.findall(r"\w+", "\n".join([ast.get_docstring(ast.parse(text)) or "", *comments])))
    modules = (path.stem for path in sorted(folder.glob("*.py")))
    return [module for module in modules if not module.startswith("__") and module not in named]


def test_each_folder_says_which_file_does_what():
    folders = [path.parent for path in SOURCES if path.name == "__init__.py"]
    assert len(folders) > 30
    assert {relative(folder): names for folder in folders if (names := unnamed_modules(folder))} == {}


@pytest.mark.parametrize("text", ['"""A house.\n\nkitchen   cooks\n"""', '"""A house."""\n\n# kitchen   cooks\n'])
def test_a_module_is_named_in_a_docstring_or_a_comment(tmp_path, text):
    for name in ("kitchen", "cellar"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "__init__.py").write_text(text + "\nfrom house import cellar\n")
    assert unnamed_modules(tmp_path) == ["cellar"]


#: What users are told of their own machine fits in few lines; comparisons are in `benchmarks/`.
MOST_LINES_OF_BENCH = 800
#: What a user or a new developer must know and cannot look up elsewhere.
MOST_WORDS = 40


def test_the_benchmark_in_the_package_is_small():
    lines = {relative(path): len(path.read_text().splitlines()) for path in (PACKAGE / "bench").rglob("*.py")}
    assert lines and sum(lines.values()) <= MOST_LINES_OF_BENCH, lines


def test_the_glossary_is_short():
    text = (ROOT / "docs" / "glossary.md").read_text().partition("## Not used")[0]
    rows = [row for row in re.findall(r"^\|.*$", text, re.MULTILINE) if not re.fullmatch(r"[|\s:-]+", row)]
    assert 10 < len(rows) - 1 <= MOST_WORDS, f"{len(rows) - 1} rows: take out what a reader knows or finds elsewhere"


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


def import_cycles(paths: Iterable[Path], folder: Path) -> list[list[str]]:
    """Groups of more than three modules that import each other. `folder`: where the package lies."""
    modules = {}
    for path in paths:
        parts = path.relative_to(folder).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: imports_of(path, modules) - {name, "syncline"} for name, path in modules.items()}
    return [group for group in strongly_connected(graph) if len(group) > 3]


def test_no_import_cycle_of_more_than_three_files():
    """Also through imports for types only: a reader follows those too."""
    assert import_cycles(SOURCES, PACKAGE.parent) == []


@pytest.mark.parametrize(
    ("imports", "cycles"),
    [
        (["b", "c", "d", "a"], [["house.a", "house.b", "house.c", "house.d"]]),
        (["b", "c", "a", "a"], []),  # three files, and one beside them
        (["b", "c", "d", "e"], []),  # a chain; there is no e
    ],
)
def test_the_guard_on_import_cycles_sees(tmp_path, imports, cycles):
    for name, other in zip("abcd", imports, strict=True):
        text = f"if TYPE_CHECKING:\n    from house import {other}\n" if name == "b" else f"import house.{other}\n"
        (tmp_path / "house" / f"{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / "house" / f"{name}.py").write_text(text)
    assert import_cycles(sorted((tmp_path / "house").iterdir()), tmp_path) == cycles


def private_definitions(tree: ast.AST) -> set[str]:
    """Private names of attributes, methods and globals that a file defines."""
    found = set()
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(node.attr)  # a base class may define it
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def foreign_private_state(trees: Mapping[str, ast.AST]) -> list[str]:
    """Where a file uses a private attribute that another of these files defines, and it does not."""
    by_file = {name: private_definitions(tree) for name, tree in trees.items()}
    ours = set().union(*by_file.values())
    found = []
    for name, tree in trees.items():
        foreign = ours - by_file[name]
        for node in walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr not in foreign:
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_class_reaches_into_the_private_state_of_a_class_in_another_file():
    assert foreign_private_state({relative(path): parsed(path) for path in SOURCES}) == []


OWNER_OF_PRIVATE_STATE = """
class Owner:
    def __init__(self): self._count = 0
    def _grow(self): self._count += 1
"""


@pytest.mark.parametrize("text", ["owner._count", "self.owner._count = 2", "owner._grow()", "Owner()._count"])
def test_the_guard_on_private_attributes_sees(text):
    assert foreign_private_state({"owner": ast.parse(OWNER_OF_PRIVATE_STATE), "other": ast.parse(text)})


@pytest.mark.parametrize(
    "text",
    [
        "self._count",  # of a subclass
        "owner.count",
        "frame._replace(number=1)",  # nothing of ours
        "class Own:\n    def __init__(self, other): self._count = other._count",  # its own class has it
    ],
)
def test_the_guard_on_private_attributes_leaves(text):
    assert not foreign_private_state({"owner": ast.parse(OWNER_OF_PRIVATE_STATE), "other": ast.parse(text)})


def is_callable_type(annotation: ast.expr | None) -> bool:
    """`Callable[[], int]`, also with `| None`, in a string, or by a module's name; not a list of them."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return is_callable_type(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp):
        return is_callable_type(annotation.left) or is_callable_type(annotation.right)
    if isinstance(annotation, ast.Subscript):
        is_optional = ast.unparse(annotation.value).rpartition(".")[2] == "Optional"
        return is_callable_type(annotation.slice if is_optional else annotation.value)
    name = annotation.attr if isinstance(annotation, ast.Attribute) else getattr(annotation, "id", "")
    return name == "Callable"


def callback_slots(tree: ast.AST) -> set[str]:
    """Attributes of this file's classes that hold what is called back: annotated so, given a parameter that is
    annotated so, or given a lambda.
    """
    found = set()
    for owner in (node for node in walk(tree) if isinstance(node, ast.ClassDef)):
        for field in owner.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found |= {field.target.id} if is_callable_type(field.annotation) else set()
        for method in (node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            arguments = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
            callbacks = {argument.arg for argument in arguments if is_callable_type(argument.annotation)}
            for target, annotation, value in assignments_of(method):
                is_own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                is_callback = isinstance(value, ast.Lambda) or getattr(value, "id", "") in callbacks
                if is_own and (is_callback or is_callable_type(annotation)):
                    found.add(target.attr)
    return found


def assignments_of(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None, ast.expr | None]]:
    """Each target of an assignment, with its annotation and its value; `a, b = c, d` are two."""
    for node in walk(tree):
        if isinstance(node, ast.AnnAssign):
            yield node.target, node.annotation, node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                values = node.value.elts if isinstance(node.value, ast.Tuple) else []
                if isinstance(target, ast.Tuple) and len(values) == len(target.elts):
                    yield from ((one, None, value) for one, value in zip(target.elts, values, strict=True))
                else:
                    yield target, None, node.value


def patched_callbacks(tree: ast.AST, slots: set[str]) -> Iterator[tuple[int, str]]:
    """Where an object gets one of these attributes from outside."""
    for target, _, value in assignments_of(tree):
        if not (isinstance(target, ast.Attribute) and target.attr in slots) or ast.unparse(target.value) == "self":
            continue
        if target.attr not in PLAIN_VALUES or isinstance(value, ast.Lambda):
            yield target.lineno, ast.unparse(target)
    for node in walk(tree):
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3):
            continue
        if getattr(node.args[1], "value", None) in slots and ast.unparse(node.args[0]) != "self":
            yield node.lineno, ast.unparse(node)


#: Names that are a callback in one class and a plain value in another, which its owner's caller sets.
PLAIN_VALUES = {
    "answer": "what a commit is answered; in worker/waits.py: takes an answer",
    "failed": "a record of a failure; in reduce/rounds.py: is told of one",
    "look": "a recorded look at the job; in cli/checks.py: makes a check",
    "servers": "the servers of a registry; in worker/waits.py: asks for them",
}


def test_no_callback_is_patched_into_an_object_from_outside():
    """What is called back is given to the constructor, or through a method that says what for."""
    slots = set().union(*(callback_slots(parsed(path)) for path in SOURCES))
    found = [
        f"{relative(path)}:{line}: {what}"
        for path in SOURCES
        for line, what in patched_callbacks(parsed(path), slots)
    ]
    assert found == []
    assert sorted(PLAIN_VALUES.keys() - slots) == [], "take these off the list: they are no callbacks"


OWNER_OF_CALLBACKS = """
class Field:
    ended: Callable[[], None]
class Annotated:
    def __init__(self):
        self.ended: Callable[[], bool] | None = None
class Given:
    def __init__(self, ended: "Callable[[], None] | None" = None):
        self.number, self.ended = 0, ended
class Assigned:
    def __init__(self):
        self.ended = lambda: None
class Plain:
    def __init__(self, number: int, many: list[Callable[[], None]]):
        self.number, self.many = number, many
"""


@pytest.mark.parametrize("owner", ["Field", "Annotated", "Given", "Assigned"])
def test_the_guard_on_callbacks_finds_the_slots_of(owner):
    tree = ast.parse(OWNER_OF_CALLBACKS)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = {node.name: callback_slots(ast.Module([node], [])) for node in classes}
    assert found[owner] == {"ended"} and found["Plain"] == set()


@pytest.mark.parametrize(
    "text",
    [
        "job.ended = print",
        "self.job.ended = lambda: None",
        "job.number, job.ended = 1, self.end",
        "job.ended: Callable[[], None] = print",
        "setattr(job, 'ended', print)",
        "request.answer = lambda: None",
    ],
)
def test_the_guard_on_callbacks_sees(text):
    assert list(patched_callbacks(ast.parse(text), {"ended", "answer"}))


@pytest.mark.parametrize(
    "text", ["self.ended = ended", "job.end_by(print)", "job.ended()", "ended = job.ended", "request.answer = 1"]
)
def test_the_guard_on_callbacks_leaves(text):
    assert not list(patched_callbacks(ast.parse(text), {"ended", "answer"}))


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


def may_reach_inside(text: str, ours: set[str]) -> bool:
    """Whether this text names anything of these, or imports something private: most tests do not, and to parse all of
    them takes seconds.
    """
    imports = r"\bfrom\s+syncline[\w.]*\s+import\s+(?:\([^)]*?|[^\n]*?)\b_"
    return not ours.isdisjoint(re.findall(r"\b_\w+", text)) or re.search(imports, text) is not None


def test_few_tests_look_at_private_state():
    """A test that is bound to the inside breaks with every change of it, right or wrong."""
    trees = [parsed(path) for path in SOURCES]
    ours = set().union(*map(private_members, trees), *map(private_globals, trees))
    found, ours = {}, ours - NAMES_OF_TORCH
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        if may_reach_inside(text, ours) and (reaches := list(reaches_inside(ast.parse(text), ours))):
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
        "from syncline.a import (\n    some,\n    _anything,\n)",
        "monkeypatch.setattr(job, '_hidden', 1)",
        "monkeypatch.setattr('syncline.a._hidden', 1)",
        "class Own:\n    def go(self): return self.job._hidden",
    ],
)
def test_the_search_for_private_state_sees(text):
    assert may_reach_inside(text, {"_hidden"})
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
