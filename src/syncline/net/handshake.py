"""Mutual proof of the job token, before anything else is read.

Four small messages: hello, challenge, proof, welcome. The proofs are HMACs under the token over both nonces, names,
roles and incarnations, and the digest of the TLS certificate as each side saw it ("" without TLS). This excludes
replays and man-in-the-middle attacks. Pure apart from the nonces: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Any, TypeVar

import msgspec

from syncline.core.wire.tables import PROTOCOL, ROLES
from syncline.errors import FrameError, ProtocolError, TokenError, VersionError
from syncline.net.transport import Peer

MAX_BYTES = 512
SECONDS = 5.0
MAX_NAME = 64
_PREFIX = struct.Struct("<4sBH")  # magic, version, length
_MAGIC = b"SYNH"


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The connecting side identifies itself."""

    job: str
    role: str
    name: str
    incarnation: int
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, array_like=True):
    """The listening side identifies itself and proves the token, or refuses."""

    role: str
    name: str
    incarnation: int
    nonce: bytes
    proof: bytes
    refused: str = ""


class Proof(msgspec.Struct, frozen=True, array_like=True):
    """The connecting side proves the token."""

    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """Both sides have proved the token; or the reason of a refusal."""

    refused: str = ""


Part = Hello | Challenge | Proof | Welcome


def pack(part: Part) -> bytes:
    body = msgspec.msgpack.encode(part)
    assert len(body) + _PREFIX.size <= MAX_BYTES
    return _PREFIX.pack(_MAGIC, PROTOCOL, len(body)) + body


def body_bytes(prefix: bytes) -> int:
    """How many bytes follow this prefix."""
    if len(prefix) != _PREFIX.size:
        raise FrameError("the handshake was cut short")
    magic, version, length = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise FrameError(f"not a handshake of ours: it begins with {magic!r}")
    if version != PROTOCOL:
        raise VersionError(
            f"the other side speaks protocol {version}, this one {PROTOCOL}; use one version of syncline"
        )
    if length + _PREFIX.size > MAX_BYTES:
        raise FrameError(f"a handshake of {length} bytes; at most {MAX_BYTES}")
    return int(length)


PREFIX_BYTES = _PREFIX.size


P = TypeVar("P", Hello, Challenge, Proof, Welcome)
# Created here, in one thread: msgspec may crash if two threads decode a type for the first time at once.
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Hello, Challenge, Proof, Welcome)
}


def unpack(kind: type[P], body: bytes) -> P:
    try:
        part: P = _decoders[kind].decode(body)
        return part
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a handshake that cannot be read: {error}") from None


def prove(token: bytes, side: bytes, hello: Hello, peer: Peer, nonce: bytes, certificate: str) -> bytes:
    parts = (
        side, PROTOCOL, hello.job, hello.role, hello.name, hello.incarnation, hello.nonce,
        peer.role, peer.name, peer.incarnation, nonce, certificate,
    )  # fmt: skip
    return hmac.new(token, msgspec.msgpack.encode(parts), hashlib.sha256).digest()


class Connecting:
    """The side that connects: `hello()`, then `answer(challenge)`, then `finish(welcome)`."""

    def __init__(self, token: bytes, job: str, me: Peer, certificate: str) -> None:
        self._token, self._certificate = token, certificate
        self._hello = Hello(job, me.role, me.name, me.incarnation, secrets.token_bytes(32))

    def hello(self) -> bytes:
        return pack(self._hello)

    def answer(self, body: bytes) -> tuple[bytes, Peer]:
        challenge = unpack(Challenge, body)
        if challenge.refused:
            raise refusal(challenge.refused)
        peer = Peer(challenge.role, challenge.name, challenge.incarnation)
        _check_peer(peer, challenge.nonce)
        expected = prove(self._token, b"listens", self._hello, peer, challenge.nonce, self._certificate)
        if not hmac.compare_digest(expected, challenge.proof):
            raise TokenError(
                f"{peer.name} does not prove the token of job {self._hello.job}; use the job file of this job"
            )
        proof = prove(self._token, b"connects", self._hello, peer, challenge.nonce, self._certificate)
        return pack(Proof(proof)), peer

    def finish(self, body: bytes) -> None:
        refused = unpack(Welcome, body).refused
        if refused:
            raise refusal(refused)


class Listening:
    """The side that listens: `challenge(hello)`, then `welcome(proof)`."""

    def __init__(self, token: bytes, job: str, me: Peer, certificate: str) -> None:
        self._token, self._job, self._me, self._certificate = token, job, me, certificate
        self._nonce = secrets.token_bytes(32)
        self._hello: Hello | None = None

    def challenge(self, body: bytes) -> bytes:
        hello = unpack(Hello, body)
        _check_peer(Peer(hello.role, hello.name, hello.incarnation), hello.nonce)
        if hello.job != self._job:
            raise TokenError(f"{hello.name} asks for another job than {self._job}; use the job file of this job")
        self._hello = hello
        me = self._me
        proof = prove(self._token, b"listens", hello, me, self._nonce, self._certificate)
        return pack(Challenge(me.role, me.name, me.incarnation, self._nonce, proof))

    @property
    def asker(self) -> str:
        """The peer's claimed name; not proved yet."""
        return self._hello.name if self._hello else "a stranger"

    def welcome(self, body: bytes) -> tuple[bytes, Peer]:
        assert self._hello is not None
        hello, proof = self._hello, unpack(Proof, body).proof
        expected = prove(self._token, b"connects", hello, self._me, self._nonce, self._certificate)
        if not hmac.compare_digest(expected, proof):
            raise TokenError(
                f"{hello.name} does not prove the token of job {self._job}; use the job file of this job"
            )
        return pack(Welcome()), Peer(hello.role, hello.name, hello.incarnation)


def _check_peer(peer: Peer, nonce: bytes) -> None:
    if peer.role not in ROLES:
        raise FrameError(f"unknown role {peer.role[:MAX_NAME]!r}")
    if not 0 < len(peer.name) <= MAX_NAME or not peer.name.isprintable():
        raise FrameError("a member's name has 1 to 64 printable characters")
    if not 0 <= peer.incarnation < 1 << 63:
        raise FrameError("an incarnation out of range")
    if len(nonce) != 32:
        raise FrameError("a nonce has 32 bytes")


def refuse(error: ProtocolError) -> bytes:
    """The message of the listening side in place of a challenge."""
    return pack(Challenge("coordinator", "-", 0, b"", b"", _short(error)))


def refuse_proof(error: ProtocolError) -> bytes:
    """The message of the listening side in place of a welcome."""
    return pack(Welcome(_short(error)))


def _short(error: ProtocolError) -> str:
    """A reason of at most 300 single-byte characters."""
    return f"{type(error).__name__}: {error}"[:300].encode("ascii", "replace").decode()


def refusal(text: str) -> ProtocolError:
    """The error in a refusal. The peer is not authenticated: removes control characters."""
    name, _, reason = "".join(c if c.isprintable() else "?" for c in text).partition(": ")
    kinds: dict[str, type[ProtocolError]] = {"TokenError": TokenError, "VersionError": VersionError}
    return kinds.get(name, FrameError)(reason or text)
