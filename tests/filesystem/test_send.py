"""Local files sent as whole objects, over one version only: conflicts, lost answers, kept times, and requests."""

import errno
import io
import itertools
import random

import fsspec
import pytest

from cachedfs.common.types import ANY_VERSION
from cachedfs.errors import AccessDenied, ObjectChanged, ObjectExists, OriginUnavailable
from cachedfs.origins import google_upload, upload
from cachedfs.origins.kept_mtime import kept_mtime_ns
from cachedfs.sim import Fault
from tests.support import KiB, noise

OLD, NEW, OTHER = noise(1000), noise(2000, seed=1), noise(2000, seed=2)
PIECE = 256 * KiB
LARGE = noise(PIECE + PIECE // 4, seed=3)  # two pieces
AT_NS = 1_234_567_890_123_456_789


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(google_upload, "PIECE", PIECE)


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(random.Random, "uniform", lambda self, least, most: 0.0)


@pytest.fixture
def drive_fs(drive):
    return fsspec.filesystem("cachedfs", target_protocol="drive")


def look_up(fs, path):
    """Return the metadata of an object as a lookup now gives it."""
    fs.invalidate_cache(path)
    return fs._described(path)


def send(fs, path, data, **options):
    file = io.BytesIO(data)
    file.seek(7)  # the position does not matter
    return fs._send(path, file, **options)


def is_looked_up(fs, path, info):
    """Return whether metadata is what a lookup gives."""
    found = look_up(fs, path)
    return found == info and info.details.items() <= found.details.items()


def unfinished(cloud):
    uploads = cloud.server._runner._service.uploads.values()
    return [upload for upload in uploads if upload.bucket == cloud.bucket and not upload.result]


# Google Cloud Storage
@pytest.mark.parametrize(("data", "n_requests"), [(b"", 1), (NEW, 1), (LARGE[:PIECE], 1), (LARGE, 3)])
def test_gcs_takes_one_request_or_one_more_than_there_are_pieces(cloud, fs, data, n_requests):
    path = cloud.path("k.txt")
    fs.ls(cloud.bucket)
    first = None
    for replaces in ("first", "first", ANY_VERSION):
        cloud.asked()
        info = send(fs, path, data, replaces=first if replaces == "first" else replaces)
        assert cloud.asked() == ["upload"] * n_requests
        assert fs.cat_file(path) == data
        assert is_looked_up(fs, path, info)
        assert info.details["contentType"] == "text/plain"
        first = info
    assert unfinished(cloud) == []


@pytest.mark.parametrize("data", [NEW, LARGE])
def test_gcs_compares_the_version_itself(cloud, fs, data):
    path = cloud.path("k")
    cloud.put("k", OLD)
    before = look_up(fs, path)
    cloud.put("k", OTHER)
    now = look_up(fs, path)
    with pytest.raises(ObjectChanged) as caught:
        send(fs, path, data, replaces=before)
    assert caught.value.errno == errno.ESTALE
    assert (
        f"gs://{path}: the object was replaced: its version is {now.fingerprint} and not {before.fingerprint}"
        in str(caught.value)
    )
    with pytest.raises(ObjectExists, match=f"gs://{path}: exists already .version {now.fingerprint}"):
        send(fs, path, data, replaces=None)
    cloud.delete("k")
    with pytest.raises(
        ObjectChanged, match=f"gs://{path}: the object was removed: version {before.fingerprint}"
    ):
        send(fs, path, data, replaces=before)
    assert not fs.exists(path)
    assert unfinished(cloud) == []


def test_gcs_compares_the_version_also_at_the_end_of_a_large_upload(cloud, fs, monkeypatch):
    path = cloud.path("k")
    cloud.put("k", OLD)
    before, read = look_up(fs, path), upload.UploadContent.piece

    def piece(self, start, stop):
        if start == PIECE and stop == len(LARGE) and cloud.server.count("upload") == 2:
            cloud.put("k", OTHER)  # when the first piece was sent
        return read(self, start, stop)

    monkeypatch.setattr(upload.UploadContent, "piece", piece)
    cloud.asked()
    with pytest.raises(ObjectChanged, match=f"its version is .* and not {before.fingerprint}"):
        send(fs, path, LARGE, replaces=before)
    assert cloud.asked() == ["metadata", *["upload"] * 4]  # the last one ends the session
    assert fs.cat_file(path) == OTHER
    assert unfinished(cloud) == []


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("data", [NEW, LARGE])
def test_an_upload_whose_answer_was_lost_is_no_conflict(cloud, fs, data, is_new):
    path = cloud.path("k")
    if not is_new:
        cloud.put("k", OLD)
    replaces = None if is_new else look_up(fs, path)
    n_requests = 1 if data is NEW else 3
    for nth in range(1, n_requests + 1):
        cloud.server.fail(Fault(kind="upload", nth=nth, lose=True))
        cloud.asked()
        replaces = send(fs, path, data, replaces=replaces)
        # A small file is sent again and then looked up. Of a large one, the service is asked what it has.
        assert cloud.asked() == [*["metadata"] * (data is NEW), *["upload"] * (n_requests + 1)]
        assert fs.cat_file(path) == data
        assert is_looked_up(fs, path, replaces)
        data = data[::-1]
        cloud.server.heal()


def test_after_a_lost_answer_another_writers_object_is_a_conflict(cloud, fs):
    path = cloud.path("k")
    cloud.server.fail(Fault(kind="upload", close_before=True))
    cloud.server.fail(Fault(kind="upload", nth=2, status=412, body="{}"))
    cloud.put("k", OTHER)
    with pytest.raises(ObjectExists):
        send(fs, path, NEW, replaces=None)
    assert fs.cat_file(path) == OTHER


def test_a_session_that_gcs_forgot_is_begun_again(cloud, fs):
    path = cloud.path("k")
    cloud.server.fail(Fault(kind="upload", nth=2, status=410))
    send(fs, path, LARGE, replaces=None)
    assert fs.cat_file(path) == LARGE
    for nth in (2, 4):
        cloud.server.fail(Fault(kind="upload", nth=nth, status=410, times=1))
    with pytest.raises(OriginUnavailable, match="the service forgot the upload 2 times"):
        send(fs, path, LARGE[::-1], replaces=ANY_VERSION)
    assert fs.cat_file(path) == LARGE


def test_an_upload_that_is_damaged_on_the_way_is_refused(cloud, fs, monkeypatch):
    path = cloud.path("k")
    read, flips = upload.UploadContent.piece, itertools.count()

    def piece(self, start, stop):
        data = read(self, start, stop)
        return data[:-1] + b"?" if next(flips) == 2 else data  # after the checksum, and one piece

    monkeypatch.setattr(upload.UploadContent, "piece", piece)
    with pytest.raises(OSError, match="hash"):
        send(fs, path, LARGE, replaces=None)
    assert not fs.exists(path)
    assert unfinished(cloud) == []


def test_a_policy_that_forbids_an_upload_is_no_conflict(cloud, fs):
    message = "'projects/p' violates constraint 'constraints/storage.retentionPolicySeconds'"
    for replaces in (None, ANY_VERSION):
        body = f'{{"error": {{"code": 412, "message": "{message}", "errors": []}}}}'
        cloud.server.fail(Fault(kind="upload", status=412, body=body))
        with pytest.raises(AccessDenied, match=f"gs://{cloud.path('k')}: a policy of the organization"):
            send(fs, cloud.path("k"), NEW, replaces=replaces)


def test_an_answer_that_proves_nothing_is_asked_for_again(cloud, fs):
    path = cloud.path("k")
    cloud.server.fail(Fault(kind="upload", status=200, body="{}", times=None))
    with pytest.raises(OriginUnavailable, match=f"gs://{path}.*Something between, such as a proxy"):
        send(fs, path, NEW, replaces=None)


@pytest.mark.parametrize("data", [NEW, LARGE])
def test_gcs_keeps_the_time_of_a_file(cloud, fs, data):
    path = cloud.path("k")
    info = send(fs, path, data, replaces=None, mtime_ns=AT_NS)
    assert info.details["metadata"] == {
        "mtime": "2009-02-13T23:31:30.123456789Z",
        "goog-reserved-file-mtime": "1234567890",
    }
    fs.invalidate_cache()
    cloud.asked()
    fs.cat_file(path, 0, 1)
    assert kept_mtime_ns(fs._object(path).details) == AT_NS  # from the headers of the read
    assert cloud.asked() == ["media"]
    (listed,) = fs.ls(cloud.bucket)
    for found in (info.details, listed, look_up(fs, path).details):
        assert kept_mtime_ns(found) == AT_NS
    send(fs, path, data, replaces=ANY_VERSION)
    assert kept_mtime_ns(fs.info(path)) is None


# Google Drive
def test_drive_compares_the_version_just_before(drive, drive_fs):
    path = drive.path("k")
    # Asks for ids of new files, and where the folder is.
    send(drive_fs, drive.path("before"), OLD, replaces=None)
    drive.asked()
    first = send(drive_fs, path, OLD, replaces=None)
    assert drive.asked() == ["get", "list", "upload"]
    assert is_looked_up(drive_fs, path, first)
    drive.asked()
    second = send(drive_fs, path, NEW, replaces=first)
    assert drive.asked() == ["get", "upload"]
    assert second.id == first.id
    assert is_looked_up(drive_fs, path, second)
    with pytest.raises(ObjectChanged) as caught:
        send(drive_fs, path, OTHER, replaces=first)
    assert caught.value.errno == errno.ESTALE
    assert f"its version is {second.fingerprint} and not {first.fingerprint}" in str(caught.value)
    with pytest.raises(ObjectExists, match=f"drive://{path}: exists already"):
        send(drive_fs, path, OTHER, replaces=None)
    assert drive_fs.cat_file(path) == NEW
    third = send(drive_fs, path, OTHER, replaces=ANY_VERSION, mtime_ns=AT_NS)
    assert third.id == first.id
    assert third.details["modified"].isoformat() == "2009-02-13T23:31:30.123000+00:00"  # in milliseconds
    assert is_looked_up(drive_fs, path, third)
    assert drive_fs.cat_file(path) == OTHER
    assert send(drive_fs, path, OTHER, replaces=third).details["modified"].year > 2009


@pytest.mark.parametrize("change", ["remove", "trash", "rename", "move"])
def test_a_drive_file_that_is_gone_from_its_path_is_a_conflict(drive, drive_fs, change):
    path = drive.path("k")
    first = send(drive_fs, path, OLD, replaces=None)
    if change == "remove":
        drive.delete("k")
    elif change == "trash":
        drive_fs.origin_fs.rm_file(path)
    else:
        fields = {"rename": {"name": "other"}, "move": {"parents": ["root"]}}[change]
        drive.server.edit(first.id, **fields)
    with pytest.raises(
        ObjectChanged, match=f"drive://{path}: the object was removed: version {first.fingerprint}"
    ):
        send(drive_fs, path, NEW, replaces=first)
    assert not drive_fs.exists(path) or drive_fs.cat_file(path) == OLD


def test_a_drive_file_by_its_id_and_by_a_shortcut(drive, drive_fs):
    first = send(drive_fs, drive.path("k"), OLD, replaces=None)
    drive.server.shortcut(f"{drive.name}/s", first.id)
    for path in (f"id:{first.id}", drive.path("s")):
        known = look_up(drive_fs, path)
        for replaces in (known, ANY_VERSION):
            info = send(drive_fs, path, noise(10), replaces=known if replaces is known else ANY_VERSION)
            assert info.id == first.id
            assert is_looked_up(drive_fs, path, info)


# Other origins
@pytest.mark.parametrize(
    ("protocol", "size"),
    [(protocol, size) for protocol in ("memory", "file") for size in (1000, (8 << 20) + 1)] + [("s3", 1000)],
)
def test_other_origins_are_compared_just_before(request, protocol, size, tmp_path):
    folder = f"{tmp_path}/data" if protocol == "file" else f"/{tmp_path.name}"
    if protocol == "s3":
        folder = request.getfixturevalue("s3").path("data")
    fs = fsspec.filesystem("cachedfs", target_protocol=protocol)
    fs.makedirs(folder, exist_ok=True)
    path, data = f"{folder}/k", noise(size, seed=4)
    with fs.transaction:  # does not delay it
        first = send(fs, path, data, replaces=None)
        assert fs.cat_file(path) == data
    # A local file that is seconds old has weaker evidence in a lookup.
    assert protocol == "file" or look_up(fs, path) == first
    fs.origin_fs.pipe_file(path, OTHER)
    with pytest.raises(ObjectChanged) as caught:
        send(fs, path, NEW, replaces=first)
    assert caught.value.errno == errno.ESTALE
    assert f"{path}: the object was replaced: its version is " in str(caught.value)
    with pytest.raises(ObjectExists, match=f"{path}: exists already"):
        send(fs, path, NEW, replaces=None)
    assert fs.cat_file(path) == OTHER
    second = send(fs, path, data, replaces=look_up(fs, path), mtime_ns=AT_NS)
    assert second.size == size
    assert fs.cat_file(path) == data
    send(fs, path, NEW, replaces=second)
    send(fs, path, OLD, replaces=ANY_VERSION)
    assert fs.cat_file(path) == OLD
    assert fs.ls(folder, detail=False) == [path]
