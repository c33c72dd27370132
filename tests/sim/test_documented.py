"""Requests of cachedfs to Drive, checked against Google's discovery documents."""

import os

import pytest

pytest.importorskip("googleapiclient")
pytest.importorskip("pydrive2")

from cachedfs.origins.drive.filesystem import DriveFileSystem
from cachedfs.sim import DriveServer
from tests.sim.discovery import problems_of_request

MiB = 1 << 20


def test_a_session_sends_only_documented_requests() -> None:
    with DriveServer() as server:
        server.put("data/sub/a.bin", os.urandom(9 * MiB))
        server.put("data/b.bin", b"b")
        server.put("c.bin", b"c", parent=server.share_drive("team"))
        fs = DriveFileSystem(token="anon", endpoint_url=server.endpoint_url, skip_instance_cache=True)
        assert len(fs.find("My Drive/data")) == 2
        assert fs.info("My Drive/data/sub/a.bin")["size"] == 9 * MiB
        assert len(fs.cat_file("My Drive/data/sub/a.bin", 5, 2 * MiB)) == 2 * MiB - 5
        with fs.open("My Drive/data/sub/a.bin") as file:
            file.seek(-7, 2)
            assert len(file.read()) == 7
        assert len(fs.cat(["My Drive/data/b.bin", "shared:team/c.bin"])) == 2
        fs.mkdir("My Drive/new")
        fs.pipe_file("My Drive/new/small", b"s")
        fs.pipe_file("My Drive/new/small", b"again")
        with fs.open("My Drive/new/big", "wb") as file:
            file.write(bytes(9 * MiB))
        fs.cp_file("My Drive/new/small", "My Drive/new/copy")
        fs.mv("My Drive/new/copy", "My Drive/data/moved")
        fs.rm("My Drive/new", recursive=True)
        with pytest.raises(FileNotFoundError):
            fs.info("My Drive/nothing")
        log = server.requests
    assert [problem for request in log for problem in problems_of_request(request)] == []
    kinds = {"list", "get", "media", "upload", "create", "update", "copy", "ids", "drives"}
    assert kinds <= {request.kind for request in log}
