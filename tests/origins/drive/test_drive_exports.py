"""Reads of Google documents: export to a requested type."""

import pytest

from cachedfs.common.types import Range, Suffix
from cachedfs.errors import NotDownloadable
from cachedfs.origins.drive.filesystem import DriveFileSystem
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import Fault
from tests.origins.contract import read

BOM = b"\xef\xbb\xbf"  # Drive begins the plain text of a document with it
SHEET = "application/vnd.google-apps.spreadsheet"
FORM = "application/vnd.google-apps.form"
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"


def exported(server):
    return [request.query["mimeType"] for request in server.requests if request.kind == "export"]


@pytest.mark.parametrize(
    ("export", "mime"),
    [
        ({"document": ".DOCX", "spreadsheet": "csv"}, DOCX),
        ({"application/vnd.google-apps.document": "text/html"}, "text/html"),
        ('{"document": "docx"}', DOCX),  # as an environment variable has it
    ],
)
async def test_export_types_are_extensions_or_mime_types_for_all_kinds_or_one(
    make, server, folder, root, export, mime
):
    server.document(f"{folder}/doc", "text")
    data, info, start, stop = await read(make(export=export), f"{root}/doc")
    assert (data, start, stop, info.size) == (b"text", 0, 4, 4)
    assert info.fingerprint is None  # two exports of one document differ: nothing of them may be cached
    assert exported(server) == [mime]
    assert server.count("media") == 0


@pytest.mark.parametrize(
    ("export", "words"),
    [
        ("docs", "docs.*did you mean docx"),
        ({"sheet": "csv"}, "'sheet'.*known: .*spreadsheet"),
        ({"document": "wrd"}, "'wrd'.*MIME type"),
        (["csv"], "export=.*dictionary.*list"),
        ('{"document": ', "export=.*dictionary.*str"),
    ],
)
def test_an_unknown_kind_or_type_is_an_error_of_the_constructor(export, words):
    with pytest.raises(ValueError, match=words):
        DriveOptions.of({"export": export})


async def test_a_kind_without_an_export_type_is_refused_with_the_solution(make, server, folder, root):
    server.document(f"{folder}/sheet", "1,2", mime=SHEET)
    with pytest.raises(NotDownloadable, match=r"spreadsheet.*csv.*drive=\{'export': \{'spreadsheet'"):
        await read(make(export={"document": "docx"}), f"{root}/sheet")
    assert exported(server) == []


async def test_an_unsupported_type_is_an_error_with_the_supported_ones(make, server, folder, root):
    server.document(f"{folder}/doc", "text")
    with pytest.raises(ValueError, match=rf"drive://{root}/doc.*a document as text/csv.*docx.*not supported"):
        await read(make(export="csv"), f"{root}/doc")
    server.document(f"{folder}/form", "", mime=FORM)
    with pytest.raises(NotDownloadable, match=rf"drive://{root}/form"):
        await read(make(export="csv"), f"{root}/form")


@pytest.mark.parametrize("want", [Range(3, 99), Range(50, 60), Suffix(3)])
async def test_a_range_is_cut_from_one_whole_export(make, server, folder, root, want):
    server.document(f"{folder}/sheet", "0123456789", mime=SHEET)
    data, info, start, stop = await read(make(export="csv"), f"{root}/sheet", want)
    expected = b"0123456789"[want.start : want.stop] if isinstance(want, Range) else b"789"
    assert (data, stop - start, info.size) == (expected, len(expected), 10)
    assert len(exported(server)) == 1
    assert "range" not in server.requests[-1].headers


async def test_a_document_with_a_resource_key_is_exported_through_a_shortcut(make, server, folder, root):
    server.edit(id := server.document(f"{folder}/doc", "text"), resourceKey="0-k")
    server.shortcut(f"{folder}/link", id)
    assert (await read(make(export="txt"), f"{root}/link"))[0] == BOM + b"text"


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 503},
        {"close_after": 3},
        {"status": 200, "html": True},
    ],
    ids=["503", "cut", "a page of the network"],
)
async def test_an_export_that_breaks_is_requested_again_from_its_start(make, server, folder, root, fault):
    server.document(f"{folder}/sheet", "0123456789", mime=SHEET)
    server.fail(Fault(kind="export", **fault))
    assert (await read(make(export="csv"), f"{root}/sheet"))[0] == b"0123456789"
    assert len(exported(server)) == 2


async def test_a_slow_export_is_waited_for_and_requested_once(make, server, folder, root):
    """Drive sends nothing before the conversion is done."""
    server.document(f"{folder}/sheet", "0123456789", mime=SHEET)
    known = await make().lookup(f"{root}/sheet")
    hasty = RetryPolicy(base_s=0.001, cap_s=0.001, stall_s=0.1, media_s=0.05, metadata_s=0.05)
    server.fail(Fault(kind="export", stall_s=0.3, times=None))
    assert (await read(make(hasty, export="csv"), f"{root}/sheet", None, known))[0] == b"0123456789"
    assert len(exported(server)) == 1


def test_an_open_file_is_one_export(server, folder, root):
    options = {"token": "anon", "endpoint_url": server.endpoint_url, "export": "csv"}
    fs = DriveFileSystem(**options, skip_instance_cache=True)
    id = server.document(f"{folder}/sheet", "a,b\n1,2\n", mime=SHEET)
    assert fs.cat_file(f"{root}/sheet", 4, -1) == b"1,2"
    with fs.open(f"{root}/sheet") as file:
        server.remove(id)  # an open file stays with the export it opened
        assert (file.size, file.readlines()) == (8, [b"a,b\n", b"1,2\n"])
    assert len(exported(server)) == 2
