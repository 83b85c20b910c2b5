"""A validation is called while a worker waits for others: the wait is left for it, and begun again."""

from __future__ import annotations

from collections.abc import Callable


class ValidationCalled(Exception):  # no error
    """Raised out of a wait; `answer` goes to the validation, and returns behind it."""

    def __init__(self, answer: Callable[[], None]) -> None:
        super().__init__("a validation is called")
        self.answer = answer
