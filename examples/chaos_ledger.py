"""Every acknowledged push is applied exactly once, whoever dies: pushes for some seconds, then proves it.

    syncline chaos --every 2s -- -w 4 -s 2 --replicas 2 --policy async examples/chaos_ledger.py --seconds 30

Push number q of a life of a worker adds 1 to cell q mod CELLS of that life's own row, in every copy of the ledger.
Each life writes down what it has sent and what was acknowledged, where its death leaves it. At the end every row must
have what was acknowledged, once; what was sent and not acknowledged, once or not at all, but alike in all copies.
With --weigh (bounded, async) a push adds its weight, 1, 2 or 3; with --own-rates (--lr-per-worker) every other row
descends at half the rate.
"""

import argparse
import os
import pathlib
import struct
import sys
import time

import numpy as np

import syncline

CELLS = 16
_RECORD = struct.Struct("<qq")  # sent, acknowledged


class Life:
    """A row of the ledger that is this process's own, and the file beside it."""

    def __init__(self, folder: pathlib.Path, most: int) -> None:
        for row in range(most):
            try:
                self._file = os.open(folder / f"row-{row}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            self.row, self.sent, self.acknowledged = row, 0, 0
            self.note()
            return
        raise SystemExit(f"more than {most} lives; say more with --lives")

    def note(self) -> None:
        os.pwrite(self._file, _RECORD.pack(self.sent, self.acknowledged), 0)


def deadline(folder: pathlib.Path, seconds: float) -> float:
    """The same for all lives: so long after the first of them began."""
    try:
        with open(folder / "began", "x") as file:
            file.write(repr(time.monotonic()))
    except FileExistsError:
        pass
    while not (text := (folder / "began").read_text()):
        time.sleep(0.001)
    return float(text) + seconds


def weight_of(push: int, weighs: bool) -> float:
    return float(1 + push % 3) if weighs else 1.0


def rate_of(row: int, own_rates: bool) -> float:
    return 0.5 if own_rates and row % 2 else 1.0


def counts(upto: int, weighs: bool) -> np.ndarray:
    """What the pushes 0 … upto − 1 add to each cell."""
    weights = [weight_of(push, weighs) for push in range(upto)]
    return np.bincount(np.arange(upto) % CELLS, weights, minlength=CELLS)


def verify(folder: pathlib.Path, copies: list[np.ndarray], weighs: bool) -> tuple[int, int, int, int]:
    """Acknowledged; lost, doubled, torn (in some copies only) among what was sent."""
    acknowledged = lost = doubled = torn = 0
    for path in folder.glob("row-*"):
        row = int(path.name.removeprefix("row-"))
        sent, acked = _RECORD.unpack(path.read_bytes())
        least, most = counts(acked, weighs), counts(sent, weighs)
        acknowledged += acked
        lost += int(max(np.maximum(least - copy[row], 0).sum() for copy in copies))
        doubled += int(max(np.maximum(copy[row] - most, 0).sum() for copy in copies))
        torn += sum(int(np.abs(copy[row] - copies[0][row]).sum()) for copy in copies[1:])
    return acknowledged, lost, doubled, torn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="push for so long")
    parser.add_argument("--until", type=pathlib.Path, help="… or until there is a file of this name")
    parser.add_argument("--size", type=int, default=100_000, help="parameters beside the ledger")
    parser.add_argument("--copies", type=int, default=2, help="of the ledger: on several servers")
    parser.add_argument("--lives", type=int, default=256, help="of all workers together, at most")
    parser.add_argument("--think", type=float, default=0.0, help="seconds of work between two pushes")
    parser.add_argument("--may-lose", action="store_true", help="one replica, and servers die: losses are no failure")
    parser.add_argument("--weigh", action="store_true", help="pushes have different weights (bounded, async)")
    parser.add_argument("--own-rates", action="store_true", help="workers have different rates (--lr-per-worker)")
    args = parser.parse_args()

    job = syncline.init()
    folder = job.folder / f"ledger-{os.getppid()}"  # the launcher's own: one per run
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"ledger-{k}" for k in range(args.copies)]
    for name in names:
        job.kv.register({name: np.zeros((args.lives, CELLS))}, syncline.Rule("Add"), reduce="sum")
    job.kv.register({"x": np.zeros(args.size, np.float32)}, syncline.Rule("SGD", lr=1.0), reduce="sum")
    life, until = Life(folder, args.lives), deadline(folder, args.seconds)
    if args.own_rates:
        job.kv.set("x", lr=rate_of(life.row, True))
    print(f"{job.name} has row {life.row}", flush=True)
    job.resume_at()  # each life has a row of its own: what it pushes was not pushed before
    while time.monotonic() < until and not (args.until and args.until.exists()):
        grads = job.kv.gradients()
        for name in names:
            grads[name][:] = 0
            grads[name][life.row, life.sent % CELLS] = 1
        grads["x"][:] = 1
        weight = weight_of(life.sent, args.weigh)
        life.sent += 1
        life.note()
        job.kv.push_pull(grads, weight=weight).wait()
        life.acknowledged = life.sent
        life.note()
        if args.think:
            time.sleep(args.think)
    job.barrier("ledger")
    pulled = job.kv.pull()
    acknowledged, lost, doubled, torn = verify(folder, [pulled[name] for name in names], args.weigh)
    rates = [rate_of(row, args.own_rates) for row in range(args.lives)]
    applied = float(pulled[names[0]].sum(axis=1) @ rates)
    if not (pulled["x"] == -applied).all():
        torn += int(np.abs(pulled["x"] + applied).max())
    if job.is_chief:
        rest = f", {torn} torn" if torn else ""
        print(f"ledger: {acknowledged} acknowledged, {lost} lost, {doubled} doubled{rest}", flush=True)
    job.close()
    sys.exit(1 if doubled or ((lost or torn) and not args.may_lose) else 0)


if __name__ == "__main__":
    main()
