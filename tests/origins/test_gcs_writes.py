"""Writes to Google Cloud Storage: success is believed where the answer proves it, and half a file is never published."""

import json
import types

import fsspec
import gcsfs.retry
import pytest

from cachedfs.errors import CachedFSError, OriginUnavailable
from cachedfs.sim import Fault, GCSServer
from tests.support import KiB, MiB, noise

OLD, NEW = noise(1000), noise(MiB, seed=1)
# gcsfs sends that much in one piece, and aiohttp takes it for large.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    """Let gcsfs wait for nothing between its tries."""
    monkeypatch.setattr(gcsfs.retry, "random", types.SimpleNamespace(random=lambda: -100.0))


@pytest.fixture
def fs(cloud):
    return fsspec.filesystem("cachedfs", target_protocol="gs")


def pipe(fs, path, folder):
    fs.pipe_file(path, NEW)


def pipe_in_parts(fs, path, folder):
    fs.pipe_file(path, NEW, chunksize=256 * KiB)


def put(fs, path, folder):
    (folder / "x").write_bytes(NEW)
    fs.put_file(folder / "x", path)


def write(fs, path, folder):
    with fs.open(path, "wb") as file:
        file.write(NEW)


def write_in_parts(fs, path, folder):
    """End with an empty part."""
    with fs.open(path, "wb", block_size=256 * KiB) as file:
        for start in range(0, MiB, 256 * KiB):
            file.write(NEW[start : start + 256 * KiB])


WRITES = [pipe, pipe_in_parts, put, write, write_in_parts]
RESOURCE = {"kind": "storage#object", "name": "k", "size": str(MiB), "generation": "7", "crc32c": "AAAAAA=="}
ANSWERS = {
    "nothing": "{}",
    "no JSON": "<html>welcome</html>",
    "another name": json.dumps({**RESOURCE, "name": "x"}),
    "another size": json.dumps({**RESOURCE, "size": "5"}),
    "another checksum": json.dumps(RESOURCE),
    "no checksum": json.dumps({**RESOURCE, "crc32c": None}),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("act", WRITES)
def test_an_upload_is_believed_where_the_answer_proves_it(cloud, fs, tmp_path, act, answer):
    path = cloud.path("k")
    cloud.put("k", OLD)
    cloud.server.fail(Fault(kind="upload", status=200, body=answer, times=None))
    with pytest.raises(OriginUnavailable, match=rf"gs://{path}.*Something between, such as a proxy"):
        act(fs, path, tmp_path)
    cloud.server.heal()
    assert fs.cat_file(path) == OLD
    cloud.server.fail(Fault(kind="upload", status=200, body=answer))
    act(fs, path, tmp_path)
    assert fs.cat_file(path) == NEW


@pytest.mark.parametrize("act", WRITES)
def test_an_end_that_is_answered_as_success_for_nothing_is_sent_again(cloud, fs, tmp_path, act):
    path = cloud.path("k")
    act(fs, path, tmp_path)
    last = cloud.server.count("upload")
    cloud.server.reset()
    for fault in ({"status": 200, "body": "{}"}, {"status": 308, "headers": {"Range": f"bytes=0-{MiB - 1}"}}):
        cloud.delete("k")
        cloud.server.heal()
        cloud.server.fail(Fault(kind="upload", nth=last, **fault))
        act(fs, path, tmp_path)
        assert fs.cat_file(path) == NEW
        fs.invalidate_cache()


@pytest.mark.parametrize("act", WRITES)
def test_an_upload_that_another_host_takes_is_not_believed(cloud, fs, tmp_path, act):
    with GCSServer(profile="off") as other:
        other.make_bucket(cloud.bucket)
        address = f"{other.endpoint_url}/upload/storage/v1/b/{cloud.bucket}/o?uploadType=media&name=k"
        for status in (302, 307):
            cloud.server.fail(Fault(kind="upload", status=status, redirect=address, times=None))
            with pytest.raises(OriginUnavailable, match=f"gs://{cloud.path('k')}.*redirected"):
                act(fs, cloud.path("k"), tmp_path)
            cloud.server.heal()


@pytest.mark.parametrize("status", [200, 404])
def test_a_page_is_no_answer_to_a_change(cloud, fs, status):
    cloud.put("a", OLD)
    page = {"status": status, "html": True, "times": None}
    for act in (
        lambda: fs.rm(cloud.path("a")),
        lambda: fs.rm_file(cloud.path("a")),
        lambda: fs.origin_fs.cp_file(cloud.path("a"), cloud.path("b")),
        lambda: fs.origin_fs.info(cloud.path("a")),
        lambda: fs.origin_fs.ls(cloud.bucket),
    ):
        cloud.server.fail(Fault(**page))
        with pytest.raises((CachedFSError, OSError)) as raised:
            act()
        assert not isinstance(raised.value, FileNotFoundError)
        cloud.server.heal()
    assert fs.origin_fs.cat_file(cloud.path("a")) == OLD
