"""Frames: a fixed header, a MessagePack struct, then raw little-endian buffers.

| bytes | field | |
|---|---|---|
| 4 | magic | `SYNC` |
| 1 | version | of the protocol |
| 1 | flags | 1: an answer, 2: shared memory comes with it, 4: a part of an answer, more follows |
| 2 | kind | place of the message in `MESSAGES` |
| 4 | request | number of the call, of the side that asked |
| 8 | job | digest of the job's id |
| 8 | incarnation | of the sender; with the handshake it stands for the member |
| 8 | generation | that the sender knows |
| 4 | term | of the coordinator, where it speaks |
| 4 | body | bytes of the struct |
| 8 | payload | bytes of the raw buffers |
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from syncline.core.wire.message import Message
from syncline.core.wire.tables import KIND, MESSAGES, PROTOCOL
from syncline.errors import FrameError, SynclineError, VersionError

HEADER = struct.Struct("<4sBBHIQQQIIQ")
_JOB_END, _SENDER_END, _TERM_END = 20, 28, 40
MAGIC = b"SYNC"
ANSWER, ATTACHED, MORE = 1, 2, 4
#: Only answers come in parts.
_FLAGS = frozenset({0, ATTACHED, ANSWER, ANSWER | ATTACHED, ANSWER | MORE, ANSWER | MORE | ATTACHED})
MAX_BODY_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 44

_encoder = msgspec.msgpack.Encoder()
_decoders = tuple(msgspec.msgpack.Decoder(message) for message in MESSAGES)


class Header(msgspec.Struct, frozen=True, gc=False):
    """The validated header of a frame."""

    kind: int
    request: int
    flags: int = 0
    job: int = 0
    incarnation: int = 0
    generation: int = 0
    term: int = 0
    body_bytes: int = 0
    payload_bytes: int = 0

    @property
    def is_answer(self) -> bool:
        return bool(self.flags & ANSWER)

    @property
    def is_part(self) -> bool:
        """Whether it is a part of an answer, not the end."""
        return bool(self.flags & MORE)

    def pack(self) -> bytes:
        return HEADER.pack(
            MAGIC, PROTOCOL, self.flags, self.kind, self.request, self.job, self.incarnation, self.generation,
            self.term, self.body_bytes, self.payload_bytes,
        )  # fmt: skip


def job_key(job: str) -> int:
    """The job's id as the number in every frame."""
    return int.from_bytes(hashlib.sha256(job.encode()).digest()[:8], "little")


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """Parses a header. Sizes are limited before anything is allocated."""
    if len(data) != HEADER.size:
        raise FrameError(f"a header of {len(data)} bytes, {HEADER.size} are needed")
    magic, version, flags, kind, request, job, incarnation, generation, term, body, payload = HEADER.unpack(data)
    is_ours = magic == MAGIC and version == PROTOCOL and flags in _FLAGS and kind < len(MESSAGES)
    if not is_ours or body > MAX_BODY_BYTES or payload > MAX_PAYLOAD_BYTES:
        raise _why_not(magic, version, flags, kind, body, payload)
    return Header(kind, request, flags, job, incarnation, generation, term, body, payload)


def _why_not(magic: bytes, version: int, flags: int, kind: int, body: int, payload: int) -> SynclineError:
    if magic != MAGIC:
        return FrameError(f"not a frame of ours: it begins with {bytes(magic)!r}")
    if version != PROTOCOL:
        return VersionError(
            f"the other side speaks protocol {version}, this one {PROTOCOL}; use one version of syncline"
        )
    if flags not in _FLAGS:
        return FrameError(f"unknown flags {flags:#x}")
    if kind >= len(MESSAGES):
        return FrameError(f"unknown kind {kind}")
    if body > MAX_BODY_BYTES:
        return FrameError(f"a body of {body} bytes; at most {MAX_BODY_BYTES}")
    return FrameError(f"a payload of {payload} bytes; at most {MAX_PAYLOAD_BYTES}")


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def head(kind: type[Message], sender: tuple[int, int, int, int], body: bytes, payload_bytes: int) -> bytes:
    """Header and body of an unanswered frame; `sender`: job, incarnation, generation, term."""
    return HEADER.pack(MAGIC, PROTOCOL, 0, KIND[kind], 0, *sender, len(body), payload_bytes) + body


def is_like(mine: bytes, theirs: bytes, sender: bytes) -> bool:
    """Whether a peer's header and body, from this sender (a packed incarnation), equal mine.

    The sender's generation and term are ignored.
    """
    return theirs[_TERM_END:] == mine[_TERM_END:] and theirs[:_SENDER_END] == mine[:_JOB_END] + sender


def kind_of(message: Message) -> int:
    return KIND[type(message)]


def decode(kind: int, body: bytes | bytearray | memoryview) -> Message:
    """Decodes the message of this kind."""
    try:
        return _decoders[kind].decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a {MESSAGES[kind].__name__} that cannot be read: {error}") from None
