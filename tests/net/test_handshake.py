"""The handshake: both sides prove the token, over everything that could be exchanged for something else."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import pytest

from syncline.core.wire.tables import PROTOCOL
from syncline.errors import FrameError, ProtocolError, TokenError, VersionError
from syncline.net import handshake
from syncline.net.handshake import (
    MAX_BYTES,
    PREFIX_BYTES,
    Challenge,
    Connecting,
    Hello,
    Listening,
    Proof,
    Welcome,
    body_bytes,
    pack,
    refusal,
    unpack,
)
from syncline.net.transport import Peer

TOKEN, JOB = bytes(range(32)), "job-1"
WORKER, SERVER = Peer("worker", "worker-0", 3), Peer("server", "server-0", 7)


def body(part: bytes) -> bytes:
    assert len(part) <= MAX_BYTES
    assert body_bytes(part[:PREFIX_BYTES]) == len(part) - PREFIX_BYTES
    return part[PREFIX_BYTES:]


def connecting(token: bytes = TOKEN, job: str = JOB, me: Peer = WORKER, certificate: str = "c") -> Connecting:
    return Connecting(token, job, me, certificate)


def listening(token: bytes = TOKEN, job: str = JOB, me: Peer = SERVER, certificate: str = "c") -> Listening:
    return Listening(token, job, me, certificate)


def shake(one: Connecting, two: Listening) -> tuple[Peer, Peer]:
    """The whole of it: whom each side has found."""
    proof, server = one.answer(body(two.challenge(body(one.hello()))))
    welcome, worker = two.welcome(body(proof))
    one.finish(body(welcome))
    return server, worker


def test_both_sides_learn_whom_they_speak_to() -> None:
    assert shake(connecting(), listening()) == (SERVER, WORKER)


def test_the_side_that_connects_refuses_a_listener_without_the_token() -> None:
    """Somebody who listens in the coordinator's place must get nothing but a hello."""
    one, two = connecting(), listening(token=bytes(32))
    with pytest.raises(TokenError) as caught:
        one.answer(body(two.challenge(body(one.hello()))))
    assert str(caught.value) == "server-0 does not prove the token of job job-1; use the job file of this job"


def test_the_side_that_listens_refuses_who_does_not_have_the_token() -> None:
    one, two = connecting(token=bytes(32)), listening()
    challenge = unpack(Challenge, body(two.challenge(body(one.hello()))))
    forged = handshake.prove(bytes(32), b"connects", unpack(Hello, body(one.hello())), SERVER, challenge.nonce, "c")
    with pytest.raises(TokenError, match="worker-0 does not prove the token of job job-1; use the job file of this"):
        two.welcome(body(pack(Proof(forged))))


def test_another_job_is_refused_before_any_proof() -> None:
    """Two jobs may have one token by mistake (a copied file): they must not mix."""
    with pytest.raises(TokenError, match="worker-0 asks for another job than job-1; use the job file of this job"):
        shake(connecting(job="job-2"), listening())


def test_another_certificate_is_somebody_in_the_middle() -> None:
    """Who sits between two hosts shows a certificate of its own: the two sides have seen different ones."""
    with pytest.raises(TokenError, match="server-0 does not prove the token"):
        shake(connecting(certificate="theirs"), listening(certificate="ours"))
    with pytest.raises(TokenError):
        shake(connecting(certificate=""), listening(certificate="ours"))


def test_a_proof_of_an_earlier_connection_is_worth_nothing() -> None:
    """Somebody who listened in repeats every byte: the new nonce of the listener makes it useless."""
    one, two = connecting(), listening()
    hello = body(one.hello())
    proof, _ = one.answer(body(two.challenge(hello)))
    two.welcome(body(proof))
    again = listening()
    again.challenge(hello)
    with pytest.raises(TokenError):
        again.welcome(body(proof))


def test_a_challenge_of_an_earlier_connection_is_worth_nothing() -> None:
    one, two = connecting(), listening()
    challenge = body(two.challenge(body(one.hello())))
    with pytest.raises(TokenError):
        connecting().answer(challenge)


def test_a_reflected_proof_is_worth_nothing() -> None:
    """The listener's own proof, sent back to it: the two directions are labelled and differ."""
    one, two = connecting(), listening()
    challenge = unpack(Challenge, body(two.challenge(body(one.hello()))))
    with pytest.raises(TokenError):
        two.welcome(body(pack(Proof(challenge.proof))))


def test_a_hello_reflected_as_a_challenge_is_worth_nothing() -> None:
    one = connecting()
    hello = unpack(Hello, body(one.hello()))
    for proof in (hello.nonce, b"", bytes(32)):
        mirrored = Challenge(hello.role, hello.name, hello.incarnation, hello.nonce, proof)
        with pytest.raises(TokenError):
            one.answer(body(pack(mirrored)))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: Hello(h.job, "coordinator", h.name, h.incarnation, h.nonce),
        lambda h: Hello(h.job, h.role, "worker-1", h.incarnation, h.nonce),
        lambda h: Hello(h.job, h.role, h.name, h.incarnation + 1, h.nonce),
        lambda h: Hello(h.job, h.role, h.name, h.incarnation, bytes(32)),
    ],
    ids=["role", "name", "incarnation", "nonce"],
)
def test_nothing_of_the_hello_can_be_exchanged_on_the_way(change: Callable[[Hello], Hello]) -> None:
    """A worker's bytes changed into a coordinator's would be a worker with a coordinator's rights."""
    one, two = connecting(), listening()
    changed = change(unpack(Hello, body(one.hello())))
    with pytest.raises(TokenError):
        one.answer(body(two.challenge(body(pack(changed)))))
    assert two.asker == changed.name


@pytest.mark.parametrize(
    "change",
    [
        lambda c: msgspec.structs.replace(c, role="worker"),
        lambda c: msgspec.structs.replace(c, name="server-1"),
        lambda c: msgspec.structs.replace(c, incarnation=8),
        lambda c: msgspec.structs.replace(c, nonce=bytes(32)),
        lambda c: msgspec.structs.replace(c, proof=c.proof[:-1]),
        lambda c: msgspec.structs.replace(c, proof=b""),
    ],
    ids=["role", "name", "incarnation", "nonce", "short proof", "no proof"],
)
def test_nothing_of_the_challenge_can_be_exchanged_on_the_way(change: Callable[[Challenge], Challenge]) -> None:
    one, two = connecting(), listening()
    changed = change(unpack(Challenge, body(two.challenge(body(one.hello())))))
    with pytest.raises(TokenError):
        one.answer(body(pack(changed)))


GOOD = Hello(JOB, "worker", "worker-0", 3, bytes(32))


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (msgspec.structs.replace(GOOD, role="root"), "unknown role 'root'"),
        (msgspec.structs.replace(GOOD, role="replica"), "unknown role 'replica'"),
        (msgspec.structs.replace(GOOD, name=""), "a member's name has 1 to 64 printable characters"),
        (msgspec.structs.replace(GOOD, name="w" * 65), "a member's name has 1 to 64 printable characters"),
        (msgspec.structs.replace(GOOD, name="w\x1b[2J"), "a member's name has 1 to 64 printable characters"),
        (msgspec.structs.replace(GOOD, incarnation=-1), "an incarnation out of range"),
        (msgspec.structs.replace(GOOD, incarnation=1 << 63), "an incarnation out of range"),
        (msgspec.structs.replace(GOOD, nonce=bytes(31)), "a nonce has 32 bytes"),
        (msgspec.structs.replace(GOOD, nonce=b""), "a nonce has 32 bytes"),
    ],
)
def test_a_hello_that_cannot_be_is_refused(hello: Hello, message: str) -> None:
    """A name goes into logs: no control characters, no kilobytes, before anything is proved."""
    with pytest.raises(FrameError, match=message):
        listening().challenge(msgspec.msgpack.encode(hello))


def test_a_challenge_that_cannot_be_is_refused() -> None:
    for changed in ({"role": "root"}, {"nonce": b""}, {"name": "\n"}):
        challenge = msgspec.structs.replace(Challenge("server", "server-0", 7, bytes(32), bytes(32)), **changed)
        with pytest.raises(FrameError):
            connecting().answer(msgspec.msgpack.encode(challenge))


def test_another_version_is_said_so_on_both_sides() -> None:
    """Each side says its own version and the other's: the reader knows which one to update."""
    hello = bytearray(connecting().hello())
    hello[4] = PROTOCOL + 1
    with pytest.raises(VersionError) as caught:
        body_bytes(bytes(hello[:PREFIX_BYTES]))
    message = f"the other side speaks protocol {PROTOCOL + 1}, this one {PROTOCOL}; use one version of syncline"
    assert str(caught.value) == message
    answer = handshake.refuse(caught.value)
    with pytest.raises(VersionError, match="use one version of syncline"):
        connecting().answer(body(answer))


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (b"", "the handshake was cut short"),
        (b"SYNH\x01", "the handshake was cut short"),
        (b"GET / H", "not a handshake of ours: it begins with b'GET '"),
        (struct.pack("<4sBH", b"SYNH", PROTOCOL, MAX_BYTES), "a handshake of 512 bytes; at most 512"),
        (struct.pack("<4sBH", b"SYNH", PROTOCOL, 65535), "a handshake of 65535 bytes; at most 512"),
    ],
)
def test_a_prefix_that_is_not_ours_is_refused(prefix: bytes, message: str) -> None:
    with pytest.raises(FrameError) as caught:
        body_bytes(prefix)
    assert str(caught.value) == message


def test_what_cannot_be_read_is_refused() -> None:
    for data in (b"", b"\xc1", b"\x91" * 500, msgspec.msgpack.encode(["job", 1]), b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(FrameError, match="a handshake that cannot be read"):
            unpack(Hello, data)


def test_every_part_fits_even_with_the_longest_names() -> None:
    """64 characters of four bytes each, and reasons that repeat them: never over 512 bytes."""
    long_worker, long_server = Peer("worker", "𝕨" * 64, 2**63 - 1), Peer("coordinator", "𝕤" * 64, 2**63 - 1)
    job = "0123456789abcdef"
    assert shake(connecting(job=job, me=long_worker), listening(job=job, me=long_server)) == (
        long_server,
        long_worker,
    )
    two = listening(job=job, me=long_server)
    two.challenge(body(connecting(job=job, me=long_worker).hello()))
    with pytest.raises(TokenError) as caught:
        two.welcome(body(pack(Proof(bytes(32)))))
    assert len(handshake.refuse_proof(caught.value)) <= MAX_BYTES
    assert len(handshake.refuse(ProtocolError("𝕩" * 5000))) <= MAX_BYTES
    assert len(handshake.refuse_proof(ProtocolError("𝕩" * 5000))) <= MAX_BYTES


def test_a_refusal_arrives_as_its_error() -> None:
    with pytest.raises(TokenError, match=r"^the reason$"):
        connecting().answer(body(handshake.refuse(TokenError("the reason"))))
    one = connecting()
    with pytest.raises(TokenError, match=r"^the reason$"):
        one.finish(body(handshake.refuse_proof(TokenError("the reason"))))
    one.finish(body(pack(Welcome())))
    assert type(refusal("KeyboardInterrupt: x")) is FrameError


def test_a_refusal_cannot_write_to_the_terminal() -> None:
    """Whoever listens on that port has proved nothing yet, and its words are shown to the user."""
    assert str(refusal("TokenError: \x1b]0;owned\x07 \r\nroot#")) == "?]0;owned? ??root#"
