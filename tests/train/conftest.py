"""An S3 server on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from train_parts import free_port


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from moto.server import ThreadedMotoServer  # here: a machine without it runs the other tests

    port = free_port()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    name = f"bucket-{port}"  # moto keeps its buckets in the process
    assert httpx2.put(f"http://127.0.0.1:{port}/{name}").status_code == 200
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield f"s3://{name}/of/ours"
    server.stop()
