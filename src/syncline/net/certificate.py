"""Each listener's self-signed certificate, made at start. The handshake authenticates its digest."""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
import tempfile

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Certificate:
    """A key and a self-signed certificate; both sides prove that they saw `digest`."""

    def __init__(self, context: ssl.SSLContext, digest: str) -> None:
        self._context, self.digest = context, digest

    @classmethod
    def create(cls) -> Certificate:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "syncline")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # Dates are not checked, so that hosts with different clocks agree.
            .not_valid_before(now - datetime.timedelta(days=365))
            .not_valid_after(now + datetime.timedelta(days=3650))
            .sign(key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + certificate.public_bytes(serialization.Encoding.PEM)
        _load(context, pem)
        return cls(context, digest(certificate.public_bytes(serialization.Encoding.DER)))

    def server_context(self) -> ssl.SSLContext:
        return self._context


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """SSLContext reads files only: uses a private file, deleted right away."""
    with tempfile.TemporaryDirectory(prefix="syncline-") as folder:
        path = os.path.join(folder, "certificate.pem")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)
        context.load_cert_chain(path)


def client_context() -> ssl.SSLContext:
    """Accepts any certificate: the handshake that follows authenticates it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def peer_digest(sock: ssl.SSLSocket) -> str:
    """The digest of the peer's certificate."""
    der = sock.getpeercert(binary_form=True)
    assert der is not None
    return digest(der)


def digest(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()
