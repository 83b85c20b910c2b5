"""The command line starts at once: a command's module is imported when it is called, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from syncline.cli.main import COMMANDS, app, load_command

#: Each of these costs more than all that `syncline --help` needs.
HEAVY = (
    "numpy",
    "torch",
    "pydantic",
    "msgspec",
    "rich",
    "ssl",
    "cryptography",
    "sqlite3",
    "asyncio",
    "fsspec",
    "click",
)


def modules_after(code: str) -> set[str]:
    words = f"import sys\n{code}\nsys.stdout.write('\\nMODULES ' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("MODULES ")[2].split())


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_every_command_has_a_page_and_a_line(name: str) -> None:
    result = CliRunner().invoke(app, [name, "--help"] if name else ["--help"])
    assert result.exit_code == 0 and "Usage:" in result.output
    if name:
        assert load_command(name).name == name and "--install-completion" not in result.output
    else:
        assert all(f"  {one.help}\n" in result.output for one in COMMANDS.values()), "each fits its line"


def test_a_command_that_is_not_there_has_a_near_one() -> None:
    result = CliRunner().invoke(app, ["stauts"])
    assert result.exit_code == 2 and "No such command 'stauts'. Did you mean 'status'" in result.output


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = """
sys.argv = ["syncline", "--help"]
from syncline.cli.main import main
try:
    main()
except SystemExit:
    pass
"""
    found = modules_after(code)
    assert {name for name in found if name.startswith("syncline.")} == {
        "syncline.cli", "syncline.cli.main", "syncline.errors",
    }  # fmt: skip
    assert found.isdisjoint(HEAVY)


def test_importing_the_package_imports_nothing_heavy_until_a_name_is_used() -> None:
    found = modules_after("import syncline; syncline.ConfigError, syncline.__version__, dir(syncline)")
    assert {name for name in found if name.startswith("syncline.")} == {"syncline.errors"}
    assert found.isdisjoint(HEAVY)
    found = modules_after("import syncline; syncline.init, syncline.Job, syncline.worker.job, syncline.config")
    assert "syncline.worker.job" in found and found.isdisjoint({"torch", "pydantic", "rich", "typer"})


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import syncline

    with pytest.raises(AttributeError, match="module 'syncline' has no attribute 'intit'"):
        syncline.intit  # noqa: B018
    assert {"init", "Job", "worker"} <= set(dir(syncline))
