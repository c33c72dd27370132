"""Requests of cachedfs to Drive, checked against Google's discovery documents."""

import os
from typing import Any

import pytest

pytest.importorskip("googleapiclient")
pytest.importorskip("pydrive2")

from cachedfs.origins.drive.filesystem import DriveFileSystem
from cachedfs.sim import DriveServer, Request
from tests.sim.discovery import Api, problems_of_reply, problems_of_request

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


# The checker itself


@pytest.mark.parametrize(
    ("verb", "path", "query", "what"),
    [
        ("GET", "/drive/v2/files", {"q": "x", "maxResults": "5", "alt": "json", "fields": "*"}, None),
        ("GET", "/drive/v2/files/x", {"alt": "media", "source": "downloadUrl"}, None),
        ("POST", "/upload/drive/v3/files", {"uploadType": "resumable"}, None),
        ("GET", "/drive/v3/files", {"maxResults": "5"}, "no parameter maxResults"),
        ("GET", "/drive/v2/files", {"maxResults": "many"}, "no number"),
        ("GET", "/drive/v2/files", {"supportsAllDrives": "1"}, "neither true nor false"),
        ("GET", "/drive/v2/files", {"projection": "x"}, "not in the enumeration"),
        ("GET", "/drive/v3/changes", {}, "pageToken is missing"),
        ("GET", "/drive/v2/about", {"alt": "media"}, "has no media"),
        ("GET", "/drive/v2/files/x", {"source": "y"}, "no parameter source"),
        ("PATCH", "/drive/v2/nothing", {}, "no such method"),
        ("GET", "/drive/v4/files", {}, "no such address"),
    ],
)
def test_the_checker_recognizes_wrong_requests(
    verb: str, path: str, query: dict[str, str], what: str | None
) -> None:
    problems = problems_of_request(Request(verb, path, query, {}))
    assert ([what in problem for problem in problems] == [True]) if what else problems == []


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ({"id": "x", "fileSize": "1", "parents": [{"id": "p"}], "createdDate": "2001-02-03T04:05:06.789Z"}, None),
        ({"name": "x"}, "no field name"),
        ({"fileSize": 1}, "no string"),
        ({"fileSize": "1.0"}, "no number"),
        ({"createdDate": "2001-02-03"}, "no date"),
        ({"parents": [{"id": 1}]}, "no string"),
        ({"labels": {"trashed": "false"}}, "no boolean"),
        ({"kind": "drive#item"}, "no drive#file"),
    ],
)  # fmt: skip
def test_the_checker_recognizes_wrong_replies(file: Any, what: str | None) -> None:
    problems = list(Api("v2").reply("GET", "/drive/v2/files/x", file))
    assert ([what in problem for problem in problems] == [True]) if what else problems == []


def test_the_checker_recognizes_wrong_errors() -> None:
    kind, body = "application/json", b'{"error": {"code": 404, "message": "m", "errors": []}}'
    assert problems_of_reply("GET", "/drive/v2/files/x", 404, kind, body) == []
    assert len(problems_of_reply("GET", "/drive/v2/files/x", 400, kind, body)) == 1
