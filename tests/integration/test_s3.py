"""S3 through the whole stack: reads, lists, writes, requests."""

from functools import partial

import fsspec

from tests.support import KiB, forget, noise

BLOCK = 64 * KiB


def test_the_second_read_sends_no_request(s3):
    data = s3.put("a.bin", noise(5 * BLOCK + 7))
    for expected in (["media", "metadata"], []):
        with fsspec.open(s3.url("a.bin")) as file:
            assert file.read() == data
        assert s3.asked() == expected
        forget()  # as in a new process


def test_an_object_whose_name_ends_in_a_slash_is_listed_read_copied_and_removed(s3):
    s3.put("d/", b"")  # makes a folder
    data = s3.put("d/lone/", b"bytes of lone")
    s3.put("d/x", b"1")
    name = s3.path("d/lone/")
    make = partial(fsspec.filesystem, "cachedfs", target_protocol="s3")
    fs = make()
    assert fs.open(name).read() == data
    assert s3.asked() == ["media", "metadata"]
    assert fs.find(s3.path("d")) == fs.find(s3.path("d/")) == [name, s3.path("d/x")]
    assert fs.ls(s3.path("d"), detail=False) == [s3.path("d/lone"), s3.path("d/x")]
    assert fs.ls(s3.path("d/lone"), detail=False) == [name]
    assert fs.info(s3.path("d/"))["name"] == s3.path("d")
    assert fs.isdir(s3.path("d/lone"))
    forget()
    fs = make(max_age=0)
    assert (fs.info(name)["name"], fs.size(name)) == (name, len(data))
    fs.cp_file(name, s3.path("d/copy/"))
    fs.copy(name, s3.path("d/file"))
    fs.pipe_file(s3.path("d/new/"), b"new")
    fs.mv(s3.path("d/new/"), s3.path("d/moved/"))
    fs.rm(name)
    found = [s3.path(f"d/{each}") for each in ("copy/", "file", "moved/", "x")]
    assert fs.cat(fs.find(s3.path("d"))) == dict(zip(found, [data, data, b"new", b"1"], strict=True))
    fs.rm(s3.path("d/"), recursive=True)
    assert not fs.exists(s3.path("d"))


def test_a_named_version_is_read_although_a_listing_is_known(s3):
    bucket = f"{s3.name}-versions"
    s3.server.make_bucket(bucket, versioned=True)
    urls = []
    for data in (b"old", b"newer"):
        s3.server.put(bucket, "d/k", data)
        fs, path = fsspec.url_to_fs(f"cachedfs::s3://{bucket}/d/k", s3={"version_aware": True}, max_age=0)
        urls.append(f"cachedfs::s3://{path}?versionId={fs.info(path)['VersionId']}")
    assert len(fs.find(f"{bucket}/d")) == 1
    for url, data in zip(urls, (b"old", b"newer"), strict=True):
        fs, path = fsspec.url_to_fs(url, s3={"version_aware": True})
        fs.ls(f"{bucket}/d")
        assert fs.cat_file(path) == data
