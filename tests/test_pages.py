"""The pages of docs/: their whole scripts run as they stand there, and no link leads nowhere."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
from tests.patience import JOB_PATIENCE, PATIENT_TOML

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def script_of(page: str) -> str:
    """The one block of a page that is a whole script."""
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return str(block)


def run(folder: pathlib.Path, *words: str) -> str:
    (folder / "syncline.toml").write_text(PATIENT_TOML)
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=JOB_PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.proof
def test_the_script_that_came_from_ddp_trains_with_two_workers(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text(script_of("coming-from.md"))
    said = run(tmp_path, "syncline", "run", "-w", "2", "-s", "1", "script.py")
    assert said.count("saved\n") == 1 and (tmp_path / "model.pt").exists()
    assert "\n  steps        8 (sync), 512 samples read, " in said, said


def test_the_tests_of_a_script_pass(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_script.py").write_text(script_of("testing.md"))
    assert "3 passed" in run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "test_script.py")


@pytest.mark.proof
@pytest.mark.parametrize("policy", ["sync", "async"])
def test_the_script_without_a_data_set_makes_its_steps(tmp_path: pathlib.Path, policy: str) -> None:
    (tmp_path / "script.py").write_text(script_of("without-a-data-set.md"))
    said = run(tmp_path, "syncline", "run", "-w", "2", "-s", "1", "--policy", policy, "script.py")
    assert said.count("the job has made 40 steps") == 2, said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: pathlib.Path) -> None:
    for target, _, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)(#([^)\s]*))?\)", page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, f"{page.name}: {target}#{heading}; there are {anchors}"


def test_the_readme_names_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in ROOT.glob("docs/*.md") if f"docs/{page.name}" not in readme] == []
