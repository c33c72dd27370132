"""Folders of Drive that the account may see and not open: every way into them is an error, and none looks empty."""

import io

import pytest

from cachedfs.errors import AccessDenied
from cachedfs.origins.upload import UploadContent
from tests.origins.contract import names, read

LIMITED = (
    r"^drive://.*you may see the folder drive://.*, not open it \(.*\): its access is limited. Ask its owner"
)


@pytest.fixture
def shut(server, folder):
    """The id of a limited folder `shut` with a file, beside a shortcut `way` to it."""
    server.put(f"{folder}/shut/in/a.bin", b"a")
    server.put(f"{folder}/open/b.bin", b"b")
    shut = server.folder(f"{folder}/shut")
    server.shortcut(f"{folder}/way", shut)
    server.limit(shut)
    return shut


@pytest.mark.parametrize("place", ["{root}/shut", "{root}/way", "id:{shut}"])
async def test_a_limited_folder_is_there_and_every_way_into_it_is_denied(origin, server, root, shut, place):
    path = place.format(root=root, shut=shut)
    here = await origin.lookup(path)
    assert (here.kind, here.id, here.details["canListChildren"]) == ("directory", shut, False)
    before = server.count()
    for ask in (
        names(origin.list(path, here)),
        names(origin.list(path, here, deep=True)),
        origin.lookup(f"{path}/in", here),
    ):
        with pytest.raises(AccessDenied, match=LIMITED):
            await ask
    assert server.count() == before  # nothing is asked that Drive answers with an empty list
    for ask in (
        names(origin.list(path)),
        origin.lookup(f"{path}/in"),
        origin.lookup(f"{path}/in/a.bin"),
        read(origin, f"{path}/in/a.bin"),
        read(origin, f"{path}/zarr.json"),
    ):
        with pytest.raises(AccessDenied, match=LIMITED):
            await ask


async def test_changes_in_a_limited_folder_are_denied_before_anything_is_sent(origin, server, root, shut):
    path = f"{root}/shut"
    server.reset()
    for change in (
        origin.call("pipe_file", f"{path}/new", b"x"),
        origin.call("makedirs", f"{path}/new"),
        origin.call("rm_file", f"{path}/in"),
        origin.call("rmdir", path),  # which is for empty folders
        origin.call("mv", f"{root}/open/b.bin", f"{path}/b.bin"),
        origin.call("cp_file", f"{root}/open/b.bin", f"{path}/b.bin"),
    ):
        with pytest.raises(AccessDenied, match=LIMITED):
            await change
    assert {request.method for request in server.requests} == {"GET"}


async def test_a_write_does_not_trust_a_folder_that_was_limited_since_it_was_remembered(
    origin, server, root, folder
):
    server.put(f"{folder}/shut/a.bin", b"a")
    await origin.lookup(f"{root}/shut/a.bin")
    server.limit(server.folder(f"{folder}/shut"))
    with pytest.raises(AccessDenied, match=LIMITED):
        await origin.writer.write(f"{root}/shut/a.bin", UploadContent(io.BytesIO(b"b")))
