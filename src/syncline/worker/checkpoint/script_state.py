"""`job.state`: what a script gets back when its job resumes, and other saved state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from syncline.errors import ConfigError, StoreError
from syncline.worker.arrays import Bytes
from syncline.worker.checkpoint import rng_state
from syncline.worker.checkpoint.boundary import Position
from syncline.worker.checkpoint.encoding import Encoder, decode, to_json


@dataclasses.dataclass(frozen=True)
class Note:
    """A script's state at the boundary `clock`, the first one after the clock `after`."""

    after: int
    clock: int
    tree: bytes
    tensors: list[tuple[str, tuple[int, ...], Bytes]]

    def covers(self, clock: int) -> bool:
        return self.after < clock <= self.clock

    @property
    def num_bytes(self) -> int:
        return len(self.tree) + sum(data.nbytes for _, _, data in self.tensors)


@dataclasses.dataclass
class SavedScriptState:
    """A script's state in a checkpoint. `is_own`: this worker saved it."""

    name: str  # of the checkpoint
    tree: dict[str, Any]
    read: Callable[[int], Bytes]
    is_own: bool
    behind: SavedScriptState | None = None  # has what is missing here

    def having(self, name: str) -> SavedScriptState | None:
        """The one of the two that has the object or value of this name."""
        return next((one for one in (self, self.behind) if one is not None and name in one.tree["state"]), None)

    @property
    def names(self) -> list[str]:
        """Names of the script's objects and values, in both."""
        return list({**self.tree["state"], **(self.behind.tree["state"] if self.behind is not None else {})})

    def __post_init__(self) -> None:
        if not isinstance(self.tree, dict) or any(type(self.tree.get(key)) is not dict for key in ("state", "parts")):
            raise StoreError(f"{self.name}: a script's state cannot be read: it has no state in it")
        try:
            kind, name, number = self.tree["position"]
            self.position: Position = (str(kind), str(name), int(number))
            self.own_step = int(self.tree["facts"]["own_step"])
        except (KeyError, TypeError, ValueError):
            raise StoreError(f"{self.name}: a script's state cannot be read: it does not say where it was") from None


class Part:
    """State of the job itself that is saved with the script: an object with state_dict, or None if it is gone.
    `is_own`: restored only to the worker that saved it.
    """

    def __init__(self, take: Callable[[], Any], put_back: Callable[[Any], None], *, is_own: bool = False) -> None:
        self.take, self.put_back, self.is_own = take, put_back, is_own


class ScriptState(MutableMapping[str, Any]):
    """By name: objects with `state_dict` and `load_state_dict`, or plain data (numbers, texts, lists, dicts,
    arrays, tensors). In a resumed job, an assigned object immediately gets its saved state.
    """

    def __init__(
        self,
        saved: Callable[[], SavedScriptState | None],
        is_over: Callable[[], bool],
        device: Callable[[], Any],
        random_restored: Callable[[], None],
    ) -> None:
        """`saved`: the state to restore. `is_over`: from then on only objects assigned for the first time are
        restored. `random_restored`: called when the random states are restored.
        """
        self._held: dict[str, Any] = {}
        self._parts: dict[str, Part] = {}
        self._claimed: set[str] = set()
        self.left_out: set[str] = set()  #: too large for a note
        self.num_loaded = 0  #: objects and schedulers that were restored
        self._saved, self._is_over, self._device = saved, is_over, device
        self._random_restored = random_restored

    # -- as the script sees it ----------------------------------------------------------------------------

    def __setitem__(self, name: str, value: Any) -> None:
        if type(name) is not str or not name:
            raise ConfigError(f"job.state[{name!r}]: a name must be a string")
        Encoder(copies=False).encode(_state_of(name, value), _path(name))
        self._held[name] = value
        is_first = name not in self._claimed
        self._claimed.add(name)
        saved = self._saved()
        if saved is not None and saved.having(name) is not None and (is_first or not self._is_over()):
            self._load(saved, name)

    def __getitem__(self, name: str) -> Any:
        if name not in self._held and name in self._unclaimed():
            saved = self._saved()
            saved = saved.having(name) if saved is not None else None
            assert saved is not None
            self._claimed.add(name)
            self._held[name] = self._value(saved, saved.tree["state"][name])
        return self._held[name]

    def _unclaimed(self) -> list[str]:
        """Saved plain data that this script has not assigned yet."""
        saved = self._saved()
        found = (
            {name: one.tree["state"][name] for name in saved.names if (one := saved.having(name))} if saved else {}
        )
        return [name for name, state in found.items() if "value" in state and name not in self._claimed]

    def __delitem__(self, name: str) -> None:
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._held, *self._unclaimed()])

    def __len__(self) -> int:
        return len(self._held) + len(self._unclaimed())

    def __repr__(self) -> str:
        return f"job.state({', '.join(self)})"

    # -- taking and putting back --------------------------------------------------------------------------

    def add_part(self, name: str, part: Part) -> None:
        """Adds state of the job itself. It is restored together with the rest, after the script has initialized
        it.
        """
        self._parts[name] = part

    def wants(self, saved: SavedScriptState) -> bool:
        """Whether it has anything that the script has not asked for yet."""
        return not self._claimed.issuperset(saved.names) or not saved.tree["parts"].keys() <= self._parts.keys()

    @property
    def has_any(self) -> bool:
        """Whether there is anything to save."""
        return bool(self._held or self._parts)

    def take(self, position: Position, after: int, clock: int, facts: dict[str, Any], most_bytes: int = 0) -> Note:
        """Copies the whole state. `most_bytes`: larger objects are left out; 0: no limit."""
        encoder, state, parts = Encoder(), dict[str, Any](), dict[str, Any]()
        for name, value in self._held.items():
            kind, path = "object" if _is_object(value) else "value", _path(name)
            self._encode(encoder, state, name, kind, path, _state_of(name, value), most_bytes)
        for name, part in self._parts.items():
            if (value := part.take()) is not None:
                self._encode(encoder, parts, name, "value", name, value, most_bytes)
        tree = {
            "format": 1,
            "position": list(position),
            "facts": facts,
            "random": {"value": encoder.encode(rng_state.take(_gpu(self._device())), "random states")},
            "state": state,
            "parts": parts,
        }
        return Note(after, clock, to_json(tree), encoder.tensors)

    def _encode(
        self, encoder: Encoder, into: dict[str, Any], name: str, kind: str, path: str, value: Any, most_bytes: int
    ) -> None:
        if most_bytes and path in self.left_out:
            return
        before = len(encoder.tensors)
        encoded = encoder.encode(value, path)
        if most_bytes and sum(data.nbytes for _, _, data in encoder.tensors[before:]) > most_bytes:
            del encoder.tensors[before:]
            self.left_out.add(path)
        else:
            into[name] = {kind: encoded}

    def put_back(self, saved: SavedScriptState, *, random: bool = True) -> None:
        """Restores everything that is here; random states last, since loading may draw numbers."""
        for name in self._held.keys() & set(saved.names):
            self._load(saved, name)
        for name in self._parts.keys() & saved.tree["parts"].keys():
            if saved.is_own or not self._parts[name].is_own:
                self._parts[name].put_back(self._value(saved, saved.tree["parts"][name]))
        if random and saved.is_own and "random" in saved.tree:
            rng_state.put_back(self._value(saved, saved.tree["random"]), _gpu(self._device()))
            self._random_restored()

    def _value(self, saved: SavedScriptState, state: Any) -> Any:
        if type(state) is not dict or len(state) != 1:
            raise StoreError(f"{saved.name}: a script's state cannot be read")
        return decode(next(iter(state.values())), saved.read, self._device())

    def _load(self, saved: SavedScriptState, name: str) -> None:
        saved = saved.having(name) or saved
        state, held = saved.tree["state"][name], self._held[name]
        found = self._value(saved, state)
        self.num_loaded += 1
        if _is_object(held) != ("object" in state):
            was = "an object with state_dict()" if "object" in state else "plain data"
            raise StoreError(f"{_path(name)} was {was} when {saved.name} was saved; give it another name, or --fresh")
        if not _is_object(held):
            self._held[name] = _into(held, found)
            return
        try:
            held.load_state_dict(found)
        except Exception as error:
            raise StoreError(
                f"{_path(name)}: what {saved.name} has of it does not fit this {type(held).__name__}: {error}; give "
                "it another name to begin it again, or start over with --fresh"
            ) from error


def _is_object(value: Any) -> bool:
    return hasattr(value, "state_dict") and not isinstance(value, type)


def _state_of(name: str, value: Any) -> Any:
    if not _is_object(value):
        return value
    if getattr(value, "is_saved_by_job", False):
        raise ConfigError(f"{_path(name)}: a {type(value).__name__} is saved by the job itself; leave this line out")
    if not hasattr(value, "load_state_dict"):
        raise ConfigError(f"{_path(name)}: {type(value).__name__} has no load_state_dict(); add it")
    return value.state_dict()


def _path(name: str) -> str:
    return f"job.state[{name!r}]"


def _gpu(device: Any) -> str:
    return str(device) if str(device).startswith("cuda") else ""


def _into(held: Any, found: Any) -> Any:
    """Loads into the script's existing object, if it is mutable."""
    if type(held) is not type(found):
        return found
    if isinstance(held, list):
        held[:] = found
    elif isinstance(held, dict | set):
        held.clear()
        held.update(found)
    else:
        return found
    return held
