"""A real S3 API server on the loopback device, for as long as a test module runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest


@contextmanager
def s3_server() -> Iterator[Any]:
    """Serve, with an environment that points at the server; yield fsspec's class for s3."""
    moto_server = pytest.importorskip("moto.server", reason="needs the extra test")
    server = moto_server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "loopback")
        kind = fsspec.get_filesystem_class("s3")
        kind.clear_instance_cache()
        yield kind
        kind.clear_instance_cache()
    server.stop()
