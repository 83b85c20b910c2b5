"""Messages between the keeper and its processes."""

from __future__ import annotations

import pytest

from syncline.errors import FrameError
from syncline.serve.replicas.link import TO_KEEPER, MessageSocket, fitting, socket_pair
from syncline.serve.replicas.messages import Failed


@pytest.mark.parametrize(
    ("words", "begins", "ends"),
    [
        ("short", "short", "short"),
        ("€" * (1 << 18), "€" * 2000, "… (262144 characters)"),
        ("a file named \udcff", "a file named ", "\\udcff"),
    ],
)
def test_words_of_an_error_always_fit_into_a_message(words: str, begins: str, ends: str) -> None:
    """They come from the operator's code or data. Else the thread that sends would end, and beats with it."""
    left, right = socket_pair()
    with left, right:
        sender, receiver = MessageSocket(left, TO_KEEPER), MessageSocket(right, TO_KEEPER)
        if words != "short":
            with pytest.raises((FrameError, UnicodeEncodeError)):
                sender.send(Failed(words=words))
        sender.send(Failed(words=fitting(words)))
        received = receiver.receive()
        assert received is not None
        message, _ = received
        assert isinstance(message, Failed) and message.words.startswith(begins) and message.words.endswith(ends)
