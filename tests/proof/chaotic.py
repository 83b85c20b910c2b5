"""A job that counts its samples, four workers of which some are always killed: what its ledger says at the end."""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Sequence

from tests import forked

SCRIPT = pathlib.Path(__file__).parent / "samples_ledger.py"


def play(
    folder: pathlib.Path, policy: str, *, seed: int, samples: int, every: str,
    options: Sequence[str] = (), arguments: Sequence[str] = (),
) -> tuple[int, int, int]:  # fmt: skip
    """Samples of all epochs that were lost, that were doubled, and how many members were killed.

    `options`: more for the job. `arguments`: more for its script.
    """
    chaos = ["chaos", "--every", every, "--for", "12s", "--seed", str(seed)]
    job = ["-w", "4", "-s", "2", "--replicas", "2", "--policy", policy, *options]
    words = [sys.executable, "-m", "syncline", *chaos, "--", *job, str(SCRIPT), *arguments, "--samples", str(samples)]
    done = forked.run(words, cwd=folder, capture_output=True, text=True, timeout=900)
    said = done.stdout + done.stderr
    found = re.findall(r"samples: (\d+) in all, (\d+) lost, (\d+) doubled", said)
    assert found and done.returncode == 0, said
    killed = re.search(r"chaos: .* (\d+) kills?", said)
    assert killed, said
    sizes, lost, doubled = zip(*found, strict=True)
    assert set(sizes) == {str(3 * samples)}
    return max(map(int, lost)), max(map(int, doubled)), int(killed[1])
