"""Runs scripts, each in a forked process: torch is imported once for all of them, and none sees another.

python -m tests.page_scripts FOLDER [FOLDER ...]: runs FOLDER/script.py there, with what it prints in FOLDER/output.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import sys
import traceback


def run_here(folder: pathlib.Path) -> int:
    """In a process of its own: becomes the script of this folder."""
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["script.py"]
    try:
        runpy.run_path("script.py", run_name="__main__")
        if syncline.worker.current.has_current_job():
            syncline.current_job().close()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    import syncline
    import syncline.torch
    import syncline.worker.current

    for name in sys.argv[1:]:
        if not (pid := os.fork()):
            os._exit(run_here(pathlib.Path(name)))
        _, status = os.waitpid(pid, 0)
        (pathlib.Path(name) / "code").write_text(str(os.waitstatus_to_exitcode(status)))
