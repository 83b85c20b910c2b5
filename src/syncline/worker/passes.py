"""Which pass over a source this is: sources are told apart as objects, and nothing here keeps them alive."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable

_Key = tuple[int, str]  # the id of a source and the name that was given with it


@dataclasses.dataclass
class _Known:
    source: object  # a weak reference; or itself where there is none, so that its id stays its own
    name: str
    kind: Hashable
    num_begun: int = 0


class Passes:
    """Counts from 0, for each source and each name that it is read by."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Known] = {}
        self._gone: set[Hashable] = set()  # kinds of sources that were read, and are there no more

    def next(
        self,
        source: object,
        name: str = "",
        epoch: int | None = None,
        *,
        kind: Hashable = None,
        named: Callable[[str], str] = str,
    ) -> tuple[str, int]:
        """What `named` made of the name when the source was new under it, and the number of this pass, or `epoch`."""
        key = (id(source), name)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(self._held(source, key), named(name), kind)
        number = known.num_begun if epoch is None else epoch
        known.num_begun = number + 1
        return known.name, number

    def is_gone(self, kind: Hashable) -> bool:
        """Whether a source of this kind was read and let go."""
        return kind in self._gone

    def _held(self, source: object, key: _Key) -> object:
        try:
            return weakref.ref(source, functools.partial(_forget, self._known, self._gone, key))
        except TypeError:
            return source


def _forget(known: dict[_Key, _Known], gone: set[Hashable], key: _Key, _: object) -> None:
    """The source is gone, and its id may be another's next."""
    if (entry := known.pop(key, None)) is not None and entry.kind is not None:
        gone.add(entry.kind)
