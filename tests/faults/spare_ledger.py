"""Spare workers, proved: every step of every life is on all copies of the ledger once, or late and on none.

Push number q of a life adds 1 to cell q of that life's own row. Each life writes down what became of its steps; what
it never heard of, since it died, is on all copies or on none.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time

import numpy as np

import syncline

LIVES, STEPS, COPIES = 16, 4096, 3


def take_row(folder: pathlib.Path) -> tuple[int, int]:
    """A row that is this life's own, and the file beside it."""
    for row in range(LIVES):
        try:
            return row, os.open(folder / f"row-{row}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            continue
    raise SystemExit("too many lives")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--until", type=pathlib.Path)
    parser.add_argument("--think", type=float)
    args = parser.parse_args()
    job = syncline.init()
    folder = job.folder / f"ledger-{os.getppid()}"
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"copy-{k}" for k in range(COPIES)]
    for name in names:
        job.kv.register({name: np.zeros((LIVES, STEPS), np.float32)}, syncline.Rule("Add"), reduce="sum")
    row, file = take_row(folder)
    print(f"{job.name} has row {row}", flush=True)
    cells, num_late, until = np.zeros((LIVES, STEPS), np.float32), 0, time.monotonic() + args.seconds
    step = 0
    job.resume_at()  # each life has a row of its own
    while time.monotonic() < until and not args.until.exists() and step < STEPS:
        os.pwrite(file, b"?", step)
        cells[row, step] = 1.0
        job.kv.push(dict.fromkeys(names, cells)).wait()
        cells[row, step] = 0.0
        late, num_late = job.exchange.num_late > num_late, job.exchange.num_late
        os.pwrite(file, b"l" if late else b"c", step)
        step += 1
        time.sleep(args.think * (8 if job.name == "worker-3" else 1))
    job.barrier("ledger")
    pulled = job.kv.pull()
    found = {"counted": 0, "late": 0, "lost": 0, "doubled": 0, "torn": 0}
    for path in folder.glob("row-*"):
        fate = np.frombuffer(path.read_bytes(), "S1")
        here = [pulled[name][int(path.name.removeprefix("row-")), : len(fate)] for name in names]
        found["counted"] += int((fate == b"c").sum())
        found["late"] += int((fate == b"l").sum())
        found["lost"] += int((here[0][fate == b"c"] != 1.0).sum())
        found["doubled"] += int((here[0][fate == b"l"] != 0.0).sum() + (here[0] > 1.0).sum())
        found["torn"] += sum(int((other != here[0]).sum()) for other in here[1:])
    if job.is_chief:
        rest = f", {found['torn']} torn" if found["torn"] else ""
        print(f"late: {found['late']}", flush=True)
        print(f"ledger: {found['counted']} acknowledged, {found['lost']} lost, {found['doubled']} doubled{rest}")
    job.close()
    sys.exit(1 if found["lost"] or found["doubled"] or found["torn"] else 0)


if __name__ == "__main__":
    main()
