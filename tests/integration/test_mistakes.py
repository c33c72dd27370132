"""Errors for bad input: the builtin class that fits, naming the URL or the option and what to do."""

import errno
import traceback
from functools import partial

import fsspec
import pytest

from cachedfs.errors import AccessDenied, CachedFSError, OriginUnavailable
from cachedfs.origins import fsspec_origin
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import Fault
from tests.support import forget


def every_read(fs, path):
    """Return functions that each read bytes of `path`."""
    return {
        "open": lambda: fs.open(path),
        "cat_file": lambda: fs.cat_file(path),
        "cat_file, a part": lambda: fs.cat_file(path, 1, 3),
        "cat_file, the end": lambda: fs.cat_file(path, -3),
        "cat": lambda: fs.cat([path]),
        "cat_ranges": lambda: fs.cat_ranges([path], 0, 1, on_error="raise"),
        "get_file": lambda: fs.get_file(path, "/tmp/never-written"),
        "local_path": lambda: fs.local_path(path).__enter__(),
    }


def failure(act, kind):
    """Return the error of `act`, which must have this class and be raised by our own code."""
    with pytest.raises(kind) as caught:
        act()
    error = caught.value
    if isinstance(error, OSError):
        assert isinstance(error, CachedFSError)
        assert error.errno
        assert error.strerror == str(error)
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    assert "/cachedfs/" in last, f"ends in {last}"
    return error


# Missing objects.
def test_a_missing_object_is_file_not_found(cloud, fs):
    path = cloud.path("nothing")
    ask = {name: getattr(fs, name) for name in ("info", "ls", "created", "modified", "ukey", "size")}
    for name, act in {**every_read(fs, path), **{each: partial(ask[each], path) for each in ask}}.items():
        error = failure(act, FileNotFoundError)
        assert error.errno == errno.ENOENT, name
        assert cloud.url("nothing") in str(error), name
        forget()


def test_a_missing_bucket_is_file_not_found(cloud, fs):
    # As in gcsfs: an empty list would be an empty dataset.
    for name in ("cat_file", "ls", "find", "glob", "du"):
        path = "no-such-bucket" if name in ("ls", "find", "du") else "no-such-bucket/**"
        assert "no-such-bucket" in str(failure(partial(getattr(fs, name), path), FileNotFoundError))
    failure(lambda: fs.pipe_file("no-such-bucket/a", b"1"), FileNotFoundError)


def test_of_several_objects_a_missing_one_can_be_omitted_or_returned(cloud, fs):
    here, absent = cloud.path("d/here"), cloud.path("absent")
    found = {here: cloud.put("d/here", b"1")}
    assert fs.cat([here, absent], on_error="omit") == found
    assert fs.cat(cloud.path("d"), recursive=True, on_error="omit") == found  # it returns the folder too
    returned = fs.cat([here, absent], on_error="return")[absent]
    assert isinstance(returned, FileNotFoundError)
    assert isinstance(fs.cat(absent, on_error="return"), FileNotFoundError)
    for path, options in (([here, absent], {}), (absent, {"on_error": "omit"})):
        with pytest.raises(FileNotFoundError):
            fs.cat(path, **options)


def test_reading_a_folder_as_an_object_is_is_a_directory(cloud, fs):
    cloud.put("d/a", b"1")
    reads = every_read(fs, cloud.path("d"))
    del reads["get_file"]  # the contract of fsspec: a folder is created
    for name, read in reads.items():
        failure(read, (IsADirectoryError, FileNotFoundError))  # before anything is known
        fs.ls(cloud.path("d"))
        error = failure(read, IsADirectoryError)
        assert error.errno == errno.EISDIR
        assert cloud.url("d") in str(error), name
        fs.invalidate_cache()


def test_a_forbidden_bucket_is_a_permission_error(cloud, fs):
    cloud.put("a", b"1")
    cloud.server.forbid(cloud.bucket)
    for name, act in every_read(fs, cloud.path("a")).items():
        error = failure(act, PermissionError)
        assert error.errno == errno.EACCES, name
        assert cloud.url("a").removeprefix("cachedfs::") in str(error), name
    for act in (
        lambda: fs.exists(cloud.path("a")),
        lambda: fs.isfile(cloud.path("a")),
        lambda: fs.isdir(cloud.path("a")),
        lambda: fs.glob(cloud.path("*")),
        lambda: fs.find(cloud.bucket),
        lambda: fs.du(cloud.bucket),
        lambda: list(fs.walk(cloud.bucket)),
        lambda: list(fs.walk(cloud.bucket, on_error="raise")),
    ):
        failure(act, PermissionError)
    reported = []
    assert list(fs.walk(cloud.bucket, on_error=reported.append)) == [(cloud.bucket, [], [])]
    assert [type(each) for each in reported] == [AccessDenied]
    absent = [(cloud.path("none"), [], [])]
    cloud.server.forbid(cloud.bucket, False)
    assert list(fs.walk(cloud.path("none"))) == list(fs.walk(cloud.path("none"), on_error="omit")) == absent


@pytest.mark.parametrize("status", [400, 401, 403, 412, 500])
def test_only_a_true_404_is_file_not_found(cloud, fs, status, monkeypatch):
    monkeypatch.setattr(fsspec_origin, "RetryPolicy", partial(RetryPolicy, tries=2, base_s=0.0))
    cloud.put("a", b"1")
    cloud.server.fail(Fault(status=status, times=None))
    for act in (
        lambda: fs.cat_file(cloud.path("a")),
        lambda: fs.exists(cloud.path("a")),
        lambda: fs.info(cloud.path("a")),
    ):
        # 400 is about the call and not about the object.
        with pytest.raises(ValueError if status == 400 else CachedFSError) as caught:
            act()
        assert not isinstance(caught.value, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        assert isinstance(caught.value, PermissionError) == (status in (401, 403))
        assert cloud.path("a") in str(caught.value)


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_empty(cloud, fs, monkeypatch):
    """fsspec would leave it out and return an incomplete list."""
    monkeypatch.setattr(fsspec_origin, "RetryPolicy", partial(RetryPolicy, tries=2, base_s=0.0))
    for name in ("d1/x", "d2/x"):
        cloud.put(name, b"1")
    root = cloud.path("").rstrip("/")
    fs.ls(root)
    fs.ls(f"{root}/d1")
    cloud.server.fail(Fault(kind="list", status=503, times=None))
    for act in (
        lambda: fs.glob(f"{root}/*/x"),
        lambda: fs.glob(f"{root}/d2/*"),
        lambda: fs.find(root, maxdepth=2),
        lambda: fs.du(root, maxdepth=2),
        lambda: list(fs.walk(root, on_error="raise")),
    ):
        with pytest.raises(OriginUnavailable, match=f"{root}/d2"):
            act()
    cloud.server.heal()
    cloud.server.fail(Fault(kind="list", status=404, times=None))  # it was removed meanwhile
    assert fs.glob(f"{root}/*/x") == [f"{root}/d1/x"]


def test_an_unknown_or_missing_protocol_is_a_value_error():
    with pytest.raises(ValueError, match="nonsense"):
        fsspec.open("cachedfs::nonsense://a").open()
    with pytest.raises(ValueError, match="cachedfs::gs://"):
        fsspec.filesystem("cachedfs")


# Options.
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("cache_sise", "1GB", "did you mean 'cache_size'"), ("keep_free", "200%", "between 0% and 100%")],
)
def test_a_wrong_option_is_a_value_error_that_names_it(option, value, says):
    for protocol, target in (("cachedfs", {"target_protocol": "gs"}), ("cgs", {})):
        with pytest.raises(ValueError, match=option) as caught:
            fsspec.filesystem(protocol, **target, **{option: value})
        assert says in str(caught.value)


# Modes and ranges.


@pytest.mark.parametrize(
    ("mode", "reported"), [("r+b", r"'r\+b'.*anew with 'wb'"), ("ab", "cannot be appended to")]
)
def test_changes_of_a_part_of_a_gcs_object_are_refused_and_lose_nothing(cloud, fs, mode, reported):
    data = cloud.put("a", b"old")
    with pytest.raises(ValueError, match=f"cachedfs::gs://{cloud.path('a')}.*{reported}"):
        fs.open(cloud.path("a"), mode)
    assert fs.cat_file(cloud.path("a")) == data


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gs": "cloud"}, "gs='cloud': expected a dictionary of options of gs://"),
        ({"gcs": 1}, "gcs=1: expected a dictionary of options of gs://"),
        ({"drive": {"token": "anon"}}, "options of drive:// were given, but the target is gs://.*gs="),
    ],
)
def test_options_of_the_target_are_in_a_dictionary_of_its_name(own_cache, options, says):
    with pytest.raises(ValueError, match=says):
        fsspec.filesystem("cachedfs", target_protocol="gs", **options)


def test_options_that_gcsfs_cannot_use_are_named(cloud, caplog):
    fs = fsspec.filesystem("cachedfs", target_protocol="gs", gs={"endpoint_url": "localhost:4443"})
    assert "write http://localhost:4443" in str(failure(lambda: fs.cat_file("b/k"), ValueError))
    cloud.put("k", b"1")
    fs = fsspec.filesystem(
        "cachedfs", target_protocol="gs", target_options={"projct": "mine", "max_paths": 9}
    )
    assert fs.cat_file(cloud.path("k")) == b"1"
    (warning,) = [record.getMessage() for record in caplog.records if "option" in record.getMessage()]
    assert "gcsfs has no option 'projct'" in warning
    assert "'project'" in warning
