"""Draws the architecture picture: python tools/docs/architecture.py docs/images/architecture.svg"""

from __future__ import annotations

import pathlib
import sys

from drawing import (
    AMBER,
    BACK,
    BLUE,
    CONTROL,
    GREEN,
    LINE,
    PANEL,
    SERVER,
    SOFT,
    STORE,
    WORKER,
    arrow,
    box,
    code,
    picture,
    text,
)

WIDTH, HEIGHT = 960, 448
GRADIENTS, PARAMETERS, DASHED = BLUE, GREEN, AMBER


def panel(x: float, width: float, title: str, command: str) -> str:
    rect = f'<rect x="{x}" y="16" width="{width}" height="{HEIGHT - 64}" rx="10" fill="{PANEL}" stroke="{LINE}"/>'
    head = text(x + 18, 42, title, 15, weight=700, anchor="start")
    said = code(x + width - 18, 42, command, anchor="end")
    return "\n".join([rect, head, said])


def servers() -> str:
    """The usual job: workers push to servers, the coordinator is beside both."""
    parts = [panel(16, 580, "Servers", "syncline run -w 3 -s 2 train.py")]
    parts.append(box(34, 60, 130, 56, CONTROL, "launcher", "starts, restarts"))
    parts.append(box(194, 60, 384, 56, CONTROL, "coordinator", "members, leases of samples, barriers, saves"))
    parts.append(arrow(164, 88, 191, 88, DASHED, dashed=True))
    for x, name in ((34, "server-0"), (224, "server-1")):
        parts.append(box(x, 160, 176, 62, SERVER, name, "slices of the parameters,", "the optimizer"))
        parts.append(pair(x + 88, 222, 256))
        down = 202 if x < 200 else 284
        parts.append(arrow(down, 116, down, 157, DASHED, dashed=True))
    parts.append(box(446, 160, 132, 62, STORE, "checkpoints", "a folder, s3://…"))
    parts.append(arrow(400, 191, 443, 191, PARAMETERS))
    parts.append(arrow(423, 116, 423, 313, DASHED, dashed=True))
    parts.append(box(34, 256, 544, 26, BACK, "shared memory on one host, TCP with TLS between hosts"))
    for x, name in ((34, "worker-0"), (222, "worker-1"), (410, "worker-2")):
        parts.append(box(x, 316, 168, 56, WORKER, name, "your script, the model"))
        parts.append(pair(x + 84, 282, 316))
    return "\n".join(parts)


def pair(x: float, top: float, bottom: float) -> str:
    """Gradients up, parameters down."""
    up = arrow(x - 8, bottom, x - 8, top + 3, GRADIENTS)
    return up + "\n" + arrow(x + 8, top, x + 8, bottom - 3, PARAMETERS)


def ring() -> str:
    """A ring: each process has a worker and a server, and holds everything."""
    parts = [panel(612, 332, "Ring", "syncline run --exchange ring")]
    for number, (x, y) in enumerate(((778, 102), (891, 218), (778, 334), (665, 218))):
        parts.append(box(x - 44, y - 27, 88, 27, WORKER, f"worker-{number}"))
        parts.append(box(x - 44, y, 88, 27, SERVER, f"server-{number}"))
    parts.append(box(738, 191, 80, 54, BACK, "sums", "of gradients"))
    parts.append(arrow(772, 129, 772, 188, GRADIENTS) + arrow(784, 191, 784, 132, GRADIENTS))
    parts.append(arrow(772, 307, 772, 248, GRADIENTS) + arrow(784, 245, 784, 304, GRADIENTS))
    parts.append(arrow(709, 212, 735, 212, GRADIENTS) + arrow(738, 224, 712, 224, GRADIENTS))
    parts.append(arrow(847, 212, 821, 212, GRADIENTS) + arrow(818, 224, 844, 224, GRADIENTS))
    parts.append(text(778, 388, "every process holds all parameters", 12, SOFT))
    return "\n".join(parts)


def legend() -> str:
    parts, x = [], 40
    for color, label, dashed in (
        (GRADIENTS, "gradients", False),
        (PARAMETERS, "parameters", False),
        (DASHED, "membership, leases, heartbeats (off the hot path)", True),
    ):
        parts.append(arrow(x, HEIGHT - 24, x + 34, HEIGHT - 24, color, dashed=dashed))
        parts.append(text(x + 44, HEIGHT - 20, label, 12, SOFT, anchor="start"))
        x += 80 + 7 * len(label)
    return "\n".join(parts)


if __name__ == "__main__":
    title = "A job with servers, and a job as a ring"
    drawn = picture(WIDTH, HEIGHT, title, [servers(), ring(), legend()], (GRADIENTS, PARAMETERS, DASHED))
    pathlib.Path(sys.argv[1]).write_text(drawn)
