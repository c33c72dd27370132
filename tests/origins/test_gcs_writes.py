"""Writes to Google Cloud Storage: which answers prove an upload, and no part of a file is published."""

import contextlib
import json
import sys
import types

import gcsfs.retry
import pytest

from cachedfs.errors import AccessDenied, CachedFSError, ObjectExists, OriginUnavailable
from cachedfs.sim import Fault, GCSServer
from tests.support import KiB, MiB, noise

OLD, NEW = noise(1000), noise(MiB, seed=1)
# gcsfs sends this much in one request, and aiohttp warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    """Let gcsfs retry without waiting."""
    monkeypatch.setattr(gcsfs.retry, "random", types.SimpleNamespace(random=lambda: -100.0))


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


@pytest.mark.parametrize(
    ("act", "answer"),
    [*((pipe, answer) for answer in ANSWERS), *((act, "another checksum") for act in WRITES[1:])],
)
def test_an_upload_succeeds_only_if_the_answer_proves_it(cloud, fs, tmp_path, act, answer):
    path, answer = cloud.path("k"), ANSWERS[answer]
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
def test_a_final_request_answered_without_an_object_is_sent_again(cloud, fs, tmp_path, act):
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
def test_an_upload_that_another_host_answers_is_an_error(cloud, fs, tmp_path, act):
    with GCSServer(profile="off") as other:
        other.make_bucket(cloud.bucket)
        address = f"{other.endpoint_url}/upload/storage/v1/b/{cloud.bucket}/o?uploadType=media&name=k"
        own = f"{cloud.server.endpoint_url}/storage/v1/b/{cloud.bucket}"
        for status, to in ((302, address), (307, address), (302, own)):  # asked with GET, the last one
            cloud.server.fail(Fault(kind="upload", status=status, redirect=to, times=None))
            with pytest.raises(OriginUnavailable, match=f"gs://{cloud.path('k')}.*redirected"):
                act(fs, cloud.path("k"), tmp_path)
            cloud.server.heal()


@pytest.mark.parametrize("status", [200, 404])
def test_an_html_page_is_no_answer_to_a_change(cloud, fs, status):
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


def test_a_write_that_a_policy_forbids_is_no_existing_object(cloud, fs):
    message = "'projects/p' violates constraint 'constraints/storage.retentionPolicySeconds'"
    body = json.dumps({"error": {"code": 412, "message": message, "errors": [{"reason": "conditionNotMet"}]}})
    cloud.server.fail(Fault(kind="upload", status=412, body=body))
    with pytest.raises(
        AccessDenied, match=f"gs://{cloud.path('k')}: a policy of the organization .*{message}"
    ):
        fs.pipe_file(cloud.path("k"), NEW)
    cloud.put("k", OLD)
    with pytest.raises(
        ObjectExists, match=f"gs://{cloud.path('k')}: an object or folder has this name already .*412"
    ):
        fs.pipe_file(cloud.path("k"), NEW, mode="create")


# A writer that fails
def with_bytes(fs, url):
    with fs.open(url, "wb", block_size=256 * KiB) as file:
        file.write(NEW)
        raise ZeroDivisionError


def with_text(fs, url):
    with fs.open(url, "w") as file:
        file.write("a" * 100_000)
        raise ZeroDivisionError


def in_a_transaction(fs, url):
    with fs.transaction, fs.open(url, "w") as file:
        file.write("a")
        raise ZeroDivisionError


@pytest.mark.parametrize("act", [with_bytes, with_text, in_a_transaction])
def test_a_failing_writer_leaves_the_previous_object(cloud, fs, act):
    cloud.put("k", OLD)
    for key in ("k", "new"):
        with pytest.raises(ZeroDivisionError):
            act(fs, cloud.url(key))
    assert fs.ls(cloud.bucket, detail=False) == [cloud.path("k")]
    assert fs.cat_file(cloud.path("k")) == OLD
    uploads = cloud.server._runner._service.uploads.values()
    assert [upload for upload in uploads if upload.bucket == cloud.bucket and not upload.result] == []


def with_exit(file):
    with file:
        file.write(b"all")
        sys.exit(0)


def with_the_end_of_an_iteration(file):
    try:
        next(iter(()))
    except StopIteration:
        file.write(b"all")
        file.close()


def with_a_generator(file):
    def sink():
        with file:
            while True:
                file.write((yield))

    writer = sink()
    next(writer)
    writer.send(b"all")
    writer.close()


@pytest.mark.parametrize("act", [with_exit, with_the_end_of_an_iteration, with_a_generator])
def test_exit_and_end_of_iteration_publish_the_file(cloud, fs, act):
    with contextlib.suppress(SystemExit):
        act(fs.open(cloud.path("k"), "wb"))
    assert fs.cat_file(cloud.path("k")) == b"all"


def test_a_file_opened_while_exceptions_are_handled_is_published(cloud, fs):
    try:
        raise KeyError
    except KeyError:
        try:
            raise FileNotFoundError
        except FileNotFoundError:
            file = fs.open(cloud.path("k"), "wb")
            with pytest.raises(ZeroDivisionError):
                with_text(fs, cloud.path("other"))
        file.write(b"all")
        file.close()
    assert fs.cat_file(cloud.path("k")) == b"all"
    assert not fs.exists(cloud.path("other"))


def test_closing_a_file_after_an_exception_raises_it_again(cloud, fs):
    def closed_while_handling():
        try:
            raise KeyError
        except KeyError:
            file.close()

    file = fs.open(cloud.path("k"), "wb")
    with pytest.raises(KeyError) as raised:
        closed_while_handling()
    assert f"{cloud.path('k')}: its file was closed because of this exception" in raised.value.__notes__[0]
    assert file.closed
    assert not fs.exists(cloud.path("k"))


@pytest.mark.parametrize(
    "answer",
    [
        {"done": False, "totalBytesRewritten": "5", "rewriteToken": "x"},  # each time the same
        {"done": True, "totalBytesRewritten": "1000", "resource": {**RESOURCE, "name": "b", "size": "1"}},
    ],
)
def test_a_copy_that_makes_no_progress_or_lacks_bytes_is_an_error(cloud, fs, answer):
    cloud.put("a", OLD)
    body = json.dumps({"kind": "storage#rewriteResponse", "objectSize": "1000", **answer})
    cloud.server.fail(Fault(kind="copy", status=200, body=body, times=None))
    with pytest.raises(OriginUnavailable, match=r"not the service's own"):
        fs.cp_file(cloud.path("a"), cloud.path("b"))
