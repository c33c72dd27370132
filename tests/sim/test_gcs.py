"""The simulated Google Cloud Storage, used by gcsfs and other clients."""

import base64
import contextlib
import datetime
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachedfs.sim import Fault, GCSServer
from tests.sim.browser import ask
from tests.support import until

# The class for GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false; the other asks for bucket layouts by gRPC over TLS.
gcsfs = pytest.importorskip("gcsfs.core")
storage = pytest.importorskip("google.cloud.storage")
obstore = pytest.importorskip("obstore")

ODD = "dir with space/ü%2F+&=?#[x]/ключ"


@pytest.fixture(scope="module")
def running() -> Iterator[GCSServer]:
    with GCSServer() as server:
        yield server


@pytest.fixture
def server(running: GCSServer, request: pytest.FixtureRequest) -> Iterator[GCSServer]:
    """A server with one bucket `b`, empty for every test."""
    running.make_bucket("b")
    running.reset()
    yield running
    running.heal()
    running.require_no_token()
    running.forbid("b", False)
    for row in json.loads(ask(running, "/storage/v1/b/b/o?maxResults=1000")[2]).get("items", []):
        running.delete("b", row["name"])


@pytest.fixture
def fs(server: GCSServer) -> Any:
    return gcsfs.GCSFileSystem(token="anon", endpoint_url=server.endpoint_url, skip_instance_cache=True)


@pytest.fixture
def bucket(server: GCSServer) -> Iterator[Any]:
    from google.auth.credentials import AnonymousCredentials

    options = {"api_endpoint": server.endpoint_url}
    client = storage.Client("project", AnonymousCredentials(), client_options=options)
    yield client.bucket("b")
    client.close()


@pytest.fixture
def store(server: GCSServer) -> Any:
    from obstore.store import GCSStore

    config = {"base_url": server.endpoint_url, "bearer_token": "t"}
    retry = {"max_retries": 2, "retry_timeout": datetime.timedelta(seconds=10)}
    return GCSStore("b", config=config, client_options={"allow_http": True}, retry_config=retry)


MEDIA = "/download/storage/v1/b/b/o/k?alt=media"


def test_gcsfs_reads_writes_and_lists(server: GCSServer, fs: Any) -> None:
    data = os.urandom(700_001)
    fs.pipe(f"b/{ODD}", b"hello world")
    with fs.open("b/d/big", "wb", block_size=2**18, metadata={"a": "1"}) as file:
        file.write(data)
    assert [fs.cat_file(f"b/{ODD}", 2, 5), fs.cat_file(f"b/{ODD}", -5)] == [b"llo", b"world"]
    assert (fs.cat("b/d/big"), fs.info("b/d/big")["metadata"]) == (data, {"a": "1"})
    for i in range(8):
        server.put("b", f"d/{i % 2}/{i}", b"")
    assert fs.ls("b/d") == ["b/d/0", "b/d/1", "b/d/big"]
    assert len(fs.find("b", maxResults=3)) == 10


def test_gcsfs_copies_moves_patches_and_removes(server: GCSServer, fs: Any) -> None:
    server.put("b", "a", b"1", content_type="text/plain")
    server.put("b", "c", b"2")
    fs.copy("b/a", "b/a2")
    fs.mv("b/a2", "b/a3")
    assert (fs.cat("b/a3"), fs.info("b/a3")["contentType"]) == (b"1", "text/plain")
    fs.setxattrs("b/c", metadata_key="v")
    changed = json.loads(ask(server, "/storage/v1/b/b/o/c")[2])
    assert (changed["metadata"], changed["metageneration"]) == ({"metadata_key": "v"}, "2")
    fs.rm(["b/a", "b/a3"])
    fs.invalidate_cache()
    assert fs.find("b") == ["b/c"]


def test_google_client_writes_and_reads_under_preconditions(server: GCSServer, bucket: Any) -> None:
    from google.api_core.exceptions import NotFound, PreconditionFailed

    old = server.put("b", "k", b"old")
    blob = bucket.blob("k")
    blob.metadata = {"colour": "grün"}
    with pytest.raises(PreconditionFailed):
        blob.upload_from_string(b"new", if_generation_match=0)
    blob.upload_from_string(b"new", if_generation_match=old, checksum="crc32c")
    again = bucket.get_blob("k")
    assert (again.download_as_bytes(checksum="md5"), again.metadata) == (b"new", {"colour": "grün"})
    assert blob.generation > old
    with pytest.raises(PreconditionFailed):
        blob.download_as_bytes(if_generation_match=old)
    with pytest.raises(NotFound):
        bucket.blob("k", generation=old).download_as_bytes()
    with pytest.raises(PreconditionFailed):
        blob.delete(if_generation_match=old)
    blob.delete(if_generation_match=blob.generation)
    assert not bucket.blob("k").exists()


def test_obstore_reads_and_lists(server: GCSServer, store: Any) -> None:
    generation = server.put("b", "dir/k ü", b"0123456789")
    head = store.head("dir/k ü")
    assert (head["size"], head["version"]) == (10, str(generation))
    assert bytes(store.get("dir/k ü").bytes()) == b"0123456789"
    assert bytes(store.get_range("dir/k ü", start=3, end=6)) == b"345"
    assert bytes(store.get("dir/k ü", options={"range": {"suffix": 4}}).bytes()) == b"6789"
    server.put("b", "dir/k ü", b"new")
    with pytest.raises(Exception, match="412") as caught:
        store.get("dir/k ü", options={"if_match": head["e_tag"]})
    assert type(caught.value).__name__ == "PreconditionError"
    server.put("b", "top", b"xx")
    here = store.list_with_delimiter()
    assert (list(here["common_prefixes"]), [row["path"] for row in here["objects"]]) == (["dir"], ["top"])
    assert [row["path"] for row in store.list(offset="dir/k ü").collect()] == ["top"]


@pytest.mark.parametrize(
    ("wanted", "status", "body", "content_range"),
    [
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=-99", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=10-", 416, b"Request range not satisfiable", "bytes */10"),
        ("bytes=5-2", 200, b"0123456789", None),
    ],
)
def test_ranges(server: GCSServer, wanted: str, status: int, body: bytes, content_range: str | None) -> None:
    server.put("b", "k", b"0123456789")
    for target in (MEDIA, "/storage/v1/b/b/o/k?alt=media"):
        got = ask(server, target, range=wanted)
        assert (got[0], got[2], got[1]["Content-Range"]) == (status, body, content_range)


def test_a_resumable_upload_can_be_queried_continued_and_cancelled(server: GCSServer) -> None:
    def begin() -> str:
        target = "/upload/storage/v1/b/b/o?uploadType=resumable&name=k"
        return str(ask(server, target, "POST", b"{}")[1]["Location"]).removeprefix(server.endpoint_url)

    at, first = begin(), bytes(256 << 10)
    status, headers, _ = ask(server, at, "PUT", content_range="bytes */*")
    assert (status, headers["Range"]) == (308, None)
    status, headers, _ = ask(server, at, "PUT", first, content_range="bytes 0-262143/*")
    assert (status, headers["Range"]) == (308, "bytes=0-262143")
    status, headers, _ = ask(server, at, "PUT", b"zz", content_range="bytes 300000-300001/300002")
    assert (status, headers["Range"]) == (308, "bytes=0-262143")
    overlapping = first[:10] + b"end"
    status, _, _ = ask(server, at, "PUT", overlapping, content_range="bytes 262134-262146/262147")
    assert (status, ask(server, MEDIA)[2]) == (200, first + b"end")
    assert ask(server, at, "PUT", content_range="bytes */*")[0] == 200
    at = begin()
    assert ask(server, at, "PUT", b"odd", content_range="bytes 0-2/*")[0] == 400
    assert ask(server, at, "DELETE")[0] == 499
    assert ask(server, at, "PUT", b"late")[0] == 404


# Ways to run


def test_a_folder_is_served_from_disk_and_never_written(tmp_path: Path) -> None:
    (tmp_path / "b" / "d").mkdir(parents=True)
    (tmp_path / "b" / "d" / "x.txt").write_bytes(b"found")
    os.utime(tmp_path / "b" / "d" / "x.txt", ns=(1, 1 << 60))
    with GCSServer(folder=tmp_path) as server:
        fs = gcsfs.GCSFileSystem(token="anon", endpoint_url=server.endpoint_url, skip_instance_cache=True)
        assert fs.cat("b/d/x.txt") == b"found"
        first = fs.info("b/d/x.txt")
        assert (first["contentType"], first["size"], first["generation"]) == ("text/plain", 5, str(1 << 60))
        assert first["md5Hash"] == base64.b64encode(hashlib.md5(b"found").digest()).decode()
        fs.pipe("b/d/y", b"made")
        fs.pipe("b/d/x.txt", b"changed")
        fs.invalidate_cache()
        assert fs.find("b") == ["b/d/x.txt", "b/d/y"]
        assert (fs.cat("b/d/x.txt"), fs.info("b/d/x.txt")["generation"]) == (b"changed", str((1 << 60) + 2))
    assert [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] == [b"found"]


def test_a_child_process_serves_and_returns_its_log(tmp_path: Path) -> None:
    with GCSServer("table", seed=3, time_scale=50, process=True) as server:
        generation = server.put("b", ODD, b"data", content_encoding="x")
        fs = gcsfs.GCSFileSystem(token="anon", endpoint_url=server.endpoint_url, skip_instance_cache=True)
        assert fs.cat_file(f"b/{ODD}") == b"data"
        [entry] = server.requests
        assert (entry.key, entry.bytes_sent, entry.status) == (ODD, 4, 200)
        server.fail(Fault(status=404, headers={"x-a": "b"}, times=None))
        assert ask(server, "/b/k")[:1] == (404,)
        assert (server.count("media"), server.count(), server.bytes_sent() > 4) == (2, 2, True)
        server.heal()
        assert ask(server, f"{MEDIA}&ifGenerationMatch={generation}")[0] == 404
        assert server.peak_concurrency == 1
        assert server.delete("b", ODD)
        with pytest.raises(TypeError, match="nonsense"):
            server.put("b", "k", b"", nonsense=1)  # type: ignore[call-arg]
        with pytest.raises(RuntimeError, match=r"TypeError: .* 'NoneType'"):
            server.put("b", "k", None)  # type: ignore[arg-type]
        assert "seed=3" in repr(server)


def test_a_server_that_refuses_drops_its_connections_and_takes_commands() -> None:
    with GCSServer() as server, socket.socket() as client:
        server.put("b", "k", bytes(8 << 20))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
        client.settimeout(60)
        client.connect(("127.0.0.1", int(server.endpoint_url.rpartition(":")[2])))
        client.sendall(b"GET /b/k HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        server.refuse()
        with contextlib.suppress(ConnectionResetError):
            while client.recv(1 << 20):
                pass
        with pytest.raises(ConnectionRefusedError):
            ask(server, "/b/k")
        server.put("b", "k", b"new")
        server.heal()
        assert ask(server, "/b/k")[2] == b"new"
        with pytest.raises(OSError, match=f"in use: {server.endpoint_url.removeprefix('http://')}"):
            GCSServer(port=int(server.endpoint_url.rpartition(":")[2])).start()


def test_a_child_process_ends_when_its_parent_is_killed() -> None:
    code = (
        "import os, signal; from cachedfs.sim import GCSServer\n"
        "server = GCSServer(process=True).start(); print(server.endpoint_url, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGKILL

    def is_gone() -> bool:
        try:
            urllib.request.urlopen(done.stdout.strip() + "/storage/v1/b", timeout=60).close()
        except OSError:
            return True
        return False

    until(is_gone)
