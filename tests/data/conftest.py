"""What tests of data have in common: an S3 endpoint."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest
from tests.data.endpoint import Bucket


@pytest.fixture(scope="session", autouse=True)
def loop() -> None:
    """fsspec's thread and its event loop stay for the life of the process: not what a test leaves behind."""
    try:
        import fsspec.asyn
    except ImportError:
        return
    fsspec.asyn.get_loop()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A real S3 endpoint on the loopback interface, as long as the test runs."""
    server = pytest.importorskip("moto.server", reason="moto is not installed")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    endpoint = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    endpoint.start()
    try:
        host, port = endpoint.get_host_and_port()
        url = f"http://{host}:{port}"
        options = {"key": "any", "secret": "any", "endpoint_url": url, "skip_instance_cache": True}
        urllib.request.urlopen(urllib.request.Request(f"{url}/moto-api/reset", method="POST")).close()
        s3fs.S3FileSystem(**options).mkdir("bucket")
        yield Bucket("s3://bucket", options, url)
    finally:
        endpoint.stop()
