"""Turns: the bench tells the processes of one side to work, and hears how long an operation took.

All processes of both sides are up all the time; whoever has no turn waits at its socket and costs nothing. A process
whose socket closes has nothing left to do, and ends.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from syncline.errors import ConfigError, ConnectionLost, SynclineError, WaitTimeout

#: For all processes of a row to be there, and for one turn.
JOIN_SECONDS = 90.0
TURN_SECONDS = 90.0
_LINE_BYTES = 1 << 12
_LOOK_SECONDS = 0.2
_LEAST_SECONDS = 1e-6  # of a difference, which a busy machine can make negative
_PATH_BYTES = 100  # a Unix socket's name has 108 at most

Operation = Callable[[], object]
#: So many operations.
Repeated = Callable[[int], object]
T = TypeVar("T", bound=msgspec.Struct)


class Player(msgspec.Struct, frozen=True):
    """The first line of a process: for which side it plays, and which of its processes it is."""

    side: str
    number: int


class Turn(msgspec.Struct, frozen=True):
    """To a process: run the operation this often."""

    count: int


class Taken(msgspec.Struct, frozen=True):
    """From a process: seconds per operation."""

    seconds: float


def take_turns(
    path: str,
    player: Player,
    operation: Operation,
    *,
    settle: Operation = lambda: None,
    num_uncounted: int = 1,
) -> None:
    """Runs the operation whenever it is this process's turn, until the bench closes the connection.

    `settle` waits for what an operation has left under way elsewhere (a GPU): the clock is read only then.
    """

    def seconds(count: int) -> float:
        for _ in range(num_uncounted):  # the caches are the other side's, and the processes of a side meet
            operation()
        settle()
        began = time.perf_counter()
        for _ in range(count):
            operation()
        settle()
        return (time.perf_counter() - began) / count

    _answer_turns(path, player, seconds)


def take_turns_less(path: str, player: Player, run: Repeated, plain: Repeated) -> None:
    """The same with what `run` takes beyond `plain`, per operation. Both return when their work is done.

    The processes of a side leave `run` together, since it ends with a round; so they also run `plain` together.
    """

    def seconds(count: int) -> float:
        run(1)
        began = time.perf_counter()
        run(count)
        then = time.perf_counter()
        plain(count)
        return max((then - began) - (time.perf_counter() - then), _LEAST_SECONDS) / count

    _answer_turns(path, player, seconds)


def _answer_turns(path: str, player: Player, seconds: Callable[[int], float]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        with sock.makefile("rwb") as lines, contextlib.suppress(ConnectionError):
            _send(lines, player)
            while line := lines.readline(_LINE_BYTES):
                _send(lines, Taken(seconds(msgspec.json.decode(line, type=Turn).count)))


def _send(lines: io.BufferedRWPair, message: msgspec.Struct) -> None:
    lines.write(msgspec.json.encode(message) + b"\n")
    lines.flush()


def _read(lines: io.BufferedRWPair, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(lines.readline(_LINE_BYTES), type=kind)
    except msgspec.DecodeError:
        raise ConnectionLost("the process has closed the connection") from None


class Table:
    """The bench's end. `look` raises when a process that is waited for can no longer come or answer."""

    def __init__(self, folder: pathlib.Path, look: Callable[[], None]) -> None:
        self.path = str(folder / "turns")
        if len(self.path.encode()) > _PATH_BYTES:
            raise ConfigError(f"{self.path} is too long for the name of a socket; choose a shorter TMPDIR")
        self._look = look
        self._players: dict[Player, tuple[socket.socket, io.BufferedRWPair]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(self.path)
            self._listener.listen(64)
            self._listener.settimeout(_LOOK_SECONDS)
        except BaseException:
            self._listener.close()
            raise

    def wait_for(self, wanted: set[Player]) -> None:
        """Until all of these are there."""
        deadline = time.monotonic() + JOIN_SECONDS
        while missing := wanted - set(self._players):
            self._look()
            if time.monotonic() > deadline:
                who = ", ".join(sorted(f"{player.side} {player.number}" for player in missing))
                raise WaitTimeout(f"the bench has waited {JOIN_SECONDS:g} s for {who}")
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            sock.settimeout(TURN_SECONDS)
            lines = sock.makefile("rwb")
            self._players[_read(lines, Player)] = (sock, lines)

    def turn(self, side: str, count: int) -> float:
        """One turn of all processes of a side; seconds per operation of the slowest."""
        players = [(player, lines) for player, (_, lines) in self._players.items() if player.side == side]
        answered: list[float] = []
        for player, lines in players:
            with self._talking_to(player):
                _send(lines, Turn(count))
        for player, lines in players:
            with self._talking_to(player):
                answered.append(_read(lines, Taken).seconds)
        return max(answered)

    @contextlib.contextmanager
    def _talking_to(self, player: Player) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise WaitTimeout(f"{player.side} {player.number}: its turn has lasted {TURN_SECONDS:g} s") from None
        except (OSError, SynclineError) as error:
            self._say_why()
            raise ConnectionLost(f"{player.side} {player.number}: {error}") from None

    def _say_why(self) -> None:
        """A connection that broke is no reason: give the process that broke it a moment to end with one."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            self._look()
            time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Everybody goes home."""
        for sock, lines in self._players.values():
            with contextlib.suppress(OSError):
                lines.close()
            sock.close()
        self._listener.close()
