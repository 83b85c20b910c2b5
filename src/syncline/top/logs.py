"""The end of a file that grows: a member's log, or the events of a run. What a program wrote is shown as text, never
obeyed.
"""

from __future__ import annotations

import os
import pathlib
import re

import msgspec

from syncline.stats import Event

#: Of the end of the log that is shown at first, and of what is read at a time.
MOST_BYTES = 200_000
#: Of one line.
MOST_CHARACTERS = 2_000
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


class LogTail:
    """Follows a file that grows, also where it begins again."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._place = -1
        self._rest = b""

    def read(self) -> list[str] | None:
        """The whole lines since the last call, as text; at first the end of the file. None: there is no such file."""
        lines = self.read_bytes()
        return None if lines is None else [clean(line) for line in lines]

    def read_bytes(self) -> list[bytes] | None:
        """The same lines, as they are."""
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if self._place < 0:
                    self._place = max(0, size - MOST_BYTES)
                    is_middle = self._place > 0
                elif size < self._place:
                    self._place, self._rest, is_middle = 0, b"", False  # another life begins its log again
                else:
                    is_middle = False
                file.seek(self._place)
                data = file.read(MOST_BYTES)
        except OSError:
            return None
        self._place += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()[-MOST_BYTES:]
        return lines[is_middle:]


class EventTail:
    """The events of a run as they come, up to a line that is damaged."""

    def __init__(self, path: pathlib.Path) -> None:
        self._tail = LogTail(path)
        self._decoder = msgspec.json.Decoder(Event)
        self.damage = ""

    def read(self) -> list[Event] | None:
        """Those since the last call. None: there is no such file here."""
        lines = self._tail.read_bytes() if not self.damage else []
        if lines is None:
            return None
        found = []
        for line in lines:
            try:
                found.append(self._decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self.damage = f"{self._tail.path.name} is damaged behind this: {error}"
                break
        return found


def clean(line: bytes) -> str:
    """Without colours and other commands to the terminal; of a progress bar what it showed last."""
    text = _ESCAPES.sub("", line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2])
    return "".join(c if c.isprintable() else " " if c == "\t" else "�" for c in text)[:MOST_CHARACTERS]
