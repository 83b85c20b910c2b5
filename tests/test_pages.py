"""The pages of the site: their scripts run as they stand there, their commands parse, and no link leads nowhere.

A block of Python is a whole script, which runs alone in seconds, or has the mark `<!-- fragment: why -->` before it;
then it is compiled only. Links and anchors are also checked by `make docs`, with those of the API pages.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import re
import shlex
import sys
from typing import Any, NamedTuple

import pytest
import typer
from tests import forked
from tests.patience import JOB_PATIENCE, PATIENT_TOML

from benchmarks.rows import all_rows
from syncline.cli.main import COMMANDS, load_command

ROOT = pathlib.Path(__file__).parents[1]
DOCS = sorted(ROOT.glob("docs/**/*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
LANGUAGES = {"ini", "python", "sh", "text", "toml"}
#: The README opens with its commands, in blocks without a language; design.md is a plan as much as a page.
BARE = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/internals/design.md"}


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    is_fragment: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: pathlib.Path) -> list[Block]:
    text, name = page.read_text(), page.relative_to(ROOT).as_posix()
    found = re.finditer(
        r"(<!-- fragment: [^\n]+ -->\n+)?^( *)```([^\n`]*)\n(.*?)^\2```$", text, re.MULTILINE | re.DOTALL
    )
    return [Block(name, text.count("\n", 0, m.start(3)) + 1, m[3].strip(), m[4], bool(m[1])) for m in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
WHOLE = [block for block in PYTHON if not block.is_fragment and block.page != "README.md"]  # test_readme runs those


def script_of(page: str) -> str:
    """The first block of a page that is a whole script."""
    return next(block.text for block in WHOLE if block.page == f"docs/{page}")


def run(folder: pathlib.Path, *words: str) -> str:
    (folder / "syncline.toml").write_text(PATIENT_TOML)
    done = forked.run(
        [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=JOB_PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.proof
def test_the_script_that_came_from_ddp_trains_with_two_workers(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(script_of("guides/from-ddp.md"))
    said = run(tmp_path, "syncline", "run", "-w", "2", "-s", "1", "script.py")
    assert said.count("saved\n") == 1 and (tmp_path / "model.pt").exists()
    assert "\n  steps        8 (sync), 512 samples read, " in said, said


def test_the_tests_of_a_script_pass(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_script.py").write_text(script_of("guides/testing.md"))
    assert "3 passed" in run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "test_script.py")


@pytest.mark.proof
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_the_script_without_a_data_set_makes_its_steps(tmp_path: pathlib.Path, policy: str) -> None:
    (tmp_path / "script.py").write_text(script_of("guides/without-a-data-set.md"))
    said = run(tmp_path, "syncline", "run", "-w", "2", "-s", "1", "--policy", policy, "script.py")
    assert said.count("the job has made 40 steps") == 2, said


@pytest.mark.parametrize("block", WHOLE, ids=str)
def test_a_whole_script_runs_alone(tmp_path: pathlib.Path, block: Block) -> None:
    (tmp_path / "script.py").write_text(block.text)
    done = forked.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=JOB_PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_blocks_say_their_language(page: pathlib.Path) -> None:
    """A block without one is neither run nor highlighted."""
    if page.relative_to(ROOT).as_posix() not in BARE:
        assert [str(block) for block in blocks_of(page) if block.language not in LANGUAGES] == []


# -- commands -----------------------------------------------------------------------------------------------


@functools.cache
def command_of(name: str) -> Any:
    return load_command(name)


def parse(words: list[str]) -> None:
    """Parses a command line of ours as `syncline` does, without running it."""
    name, *rest = words
    assert name in COMMANDS, f"there is no command {name!r}"
    command, parent = command_of(name), typer.Context(command_of(name), info_name=name)
    if name in ("checkpoint", "serve-ctl"):
        command = command.commands[rest.pop(0)]
    if name == "chaos":
        place = rest.index("--")
        parse(["run", *rest[place + 1 :]])
        rest = rest[:place]
    params = command.make_context(name, rest, parent=parent).params
    said = str(params.get("script") or "")
    assert not said.startswith("-"), f"there is no option {said}"


def command_lines() -> list[tuple[str, str]]:
    found = []
    for block in BLOCKS:
        if block.language in ("sh", ""):
            lines = block.text.replace("\\\n", " ").splitlines()
            found += [(str(block), line) for line in lines if line.startswith("syncline ")]
    return found


@pytest.mark.parametrize(("where", "line"), command_lines(), ids=lambda value: value.split("#")[0].strip()[:60])
def test_commands_parse(where: str, line: str) -> None:
    try:
        parse(shlex.split(line, comments=True)[1:])
    except Exception as error:
        raise AssertionError(f"{where}: {line}: {error}") from error


def test_the_parser_of_commands_sees_what_is_wrong() -> None:
    for line in ("rum x.py", "run --polcy sync x.py", "run -w 2 -z x.py", "chaos -- --epochs 3", "checkpoint list x"):
        with pytest.raises(Exception):  # noqa: B017  # typer has several
            parse(line.split())
    parse(["run", "-w", "2", "x.py", "--epochs", "3"])


def test_options_in_the_text_exist() -> None:
    """In commands that stand in a sentence, which are often not whole."""
    missing = []
    for page in PAGES:
        for line in re.findall(r"`syncline ([a-z-]+ [^`]*)`", page.read_text()):
            name, *words = line.split()
            if name not in COMMANDS or name in ("checkpoint", "serve-ctl"):
                continue
            known = {option for each in {name, "run"} for p in command_of(each).params for option in p.opts}
            for word in words:
                if word.endswith(".py") or word == "-m":
                    break  # from here on, the script's
                if re.match(r"--[a-z]", word) and word.partition("=")[0].rstrip(",;") not in known | {"--help"}:
                    missing.append(f"{page.name}: syncline {line}")
    assert missing == []


# -- links --------------------------------------------------------------------------------------------------


@functools.cache
def reference() -> Any:
    """tools/docs/reference.py, which makes parts of pages."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools/docs/reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def whole_text(page: pathlib.Path) -> str:
    text = page.read_text()
    return str(reference().fill(text)) if "<!-- generated:" in text else text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: pathlib.Path) -> None:
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(#([^)\s]*))?\)", whole_text(page)):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        if heading and "\n::: " not in whole_text(path):  # those of API pages are seen by `make docs`
            titles = re.findall(r"^#+ (.*)$", whole_text(path), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            spans = re.findall(r'id="(\w+)"', whole_text(path))
            assert heading in anchors + spans, f"{page.name}: {target}#{heading}; there are {anchors}"


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in DOCS)


def test_the_readme_names_every_guide() -> None:
    readme = (ROOT / "README.md").read_text()
    named = [
        "index.md",
        "concepts.md",
        "glossary.md",
        *(f"internals/{x}.md" for x in ("design", "reliability", "performance")),
    ]
    named += [page.relative_to(ROOT / "docs").as_posix() for page in DOCS if page.parent.name == "guides"]
    assert [name for name in named if f"docs/{name}" not in readme] == []


# -- what is generated --------------------------------------------------------------------------------------


def test_the_reference_has_every_command_setting_and_error() -> None:
    made = {name: whole_text(ROOT / f"docs/reference/{name}.md") for name in ("command-line", "settings", "errors")}
    for name in COMMANDS:
        assert f"## syncline {name}\n" in made["command-line"]
    for option in ("--policy", "--replicas", "--baseline", "--json", "auto:MIN:MAX"):
        assert option in made["command-line"]
    for name in reference().config.JobConfig.__struct_fields__:
        assert f"`{name}`" in made["settings"]
    for kind in reference().error_classes():
        assert re.search(rf"^## {kind.__name__}\n.*?^\*\*Remedy:\*\* \S", made["errors"], re.MULTILINE | re.DOTALL)


def test_pictures_are_what_their_scripts_draw(tmp_path: pathlib.Path) -> None:
    """Plots come from the tables of the performance page: a figure that changes there changes its plot."""
    for words in (
        ("architecture.py", str(tmp_path / "architecture.svg")),
        ("concepts.py", str(tmp_path)),
        ("plots.py", str(ROOT / "docs/internals/performance.md"), str(tmp_path)),
    ):
        command = [sys.executable, str(ROOT / "tools/docs" / words[0]), *words[1:]]
        forked.run(command, check=True, timeout=JOB_PATIENCE)
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert drawn == {file.name: file.read_text() for file in (ROOT / "docs/images").glob("*.svg")}


def test_rows_of_the_performance_page_can_be_measured() -> None:
    """One command is named for all of its rows, and their goals are those that the command prints."""
    reaches = {row.name: str(row.reach).replace("printed", "") for row in all_rows()}
    page = (ROOT / "docs/internals/performance.md").read_text()
    told = {}
    for block in re.findall(r"^\| row \|.*\n(?:\|.*\n)+", page, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        told |= {row[0].strip("`"): row[head.index("goal")] for row in rows}
    assert len(told) > 40 and {name: reaches.get(name) for name in told} == told
