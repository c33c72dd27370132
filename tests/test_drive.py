"""Google Drive through the cache: what it costs, what it keeps, and that it reads like every other origin."""

import asyncio
import json
import os
import pickle

import fsspec
import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr

from cachedfs.errors import IsAFolder, NotDownloadable, ObjectChanged, ObjectNotFound
from cachedfs.sim import DriveServer, Fault
from tests.support import KiB, MiB, forget, noise, until

FORMS = ["cachedfs::drive://", "cdrive://"]


@pytest.fixture
def fs(drive):
    return fsspec.filesystem("cdrive")


@pytest.fixture(params=FORMS)
def base(request, drive):
    """A URL, in each form, under which a test may write and read."""
    return drive.url("data", prefix=request.param)


def revisions_hidden(drive, key):
    """Make a file one whose old revisions this account may not read: only a second look proves a version then."""
    (item,) = drive.server.find(f"{drive.name}/{key}")
    drive.server.edit(item["id"], capabilities={"canDownload": True, "canReadRevisions": False})


# What it costs.


def test_an_unknown_file_costs_its_way_and_its_data_then_nothing(drive):
    data = drive.put("deep/er/a.bin", noise(40_000))
    # My Drive, the test's folder, two folders and the file, each looked up in the one before; then the bytes.
    for expected in (["get", "list", "list", "list", "list", "media"], []):
        with fsspec.open(drive.url("deep/er/a.bin")) as file:
            assert file.read() == data
        assert drive.asked() == expected
    forget()
    with fsspec.open(drive.url("deep/er/a.bin")) as file:
        assert file.read() == data
    assert drive.asked() == []


def test_its_neighbour_costs_one_question_and_its_data(drive, fs):
    drive.put("deep/er/a.bin", noise(100))
    data = drive.put("deep/er/b.bin", noise(200))
    fs.cat_file(drive.path("deep/er/a.bin"))
    drive.asked()
    assert fs.cat_file(drive.path("deep/er/b.bin")) == data
    assert drive.asked() == ["list", "media"]


def test_opening_a_listed_file_costs_nothing_and_reading_it_one_request(drive, fs):
    data = {f"{i}.txt": drive.put(f"{i}.txt", noise(1000, seed=i)) for i in range(20)}
    names = fs.ls(drive.path(), detail=False)
    assert drive.asked() == ["change", "get", "list", "list"]  # from when on changes are told, once
    files = [fs.open(name) for name in names]
    assert [fs.exists(name) for name in names] == [True] * 20
    assert drive.asked() == []
    assert {os.path.basename(file.path): file.read() for file in files} == data
    assert drive.asked() == ["media"] * 20


@pytest.mark.parametrize(("hidden", "expected"), [(False, ["media"]), (True, ["get", "media"])])
def test_a_part_of_a_listed_file_costs_a_second_look_only_where_no_revision_can_be_read(
    drive, fs, hidden, expected
):
    data = drive.put("big.bin", noise(12 * MiB))
    if hidden:
        revisions_hidden(drive, "big.bin")
    fs.ls(drive.path())
    drive.asked()
    assert fs.cat_file(drive.path("big.bin"), 3 * MiB, 5 * MiB) == data[3 * MiB : 5 * MiB]
    assert drive.asked() == expected


def test_a_whole_small_file_needs_no_second_look(drive, fs):
    data = drive.put("small.bin", noise(3 * MiB))
    revisions_hidden(drive, "small.bin")
    fs.ls(drive.path())
    drive.asked()
    assert fs.cat_file(drive.path("small.bin")) == data
    assert drive.asked() == ["media"]


@pytest.mark.parametrize("hidden", [False, True])
def test_a_big_file_costs_a_request_for_every_8_mib_and_a_second_look_each_only_where_no_revision_can_be_read(
    drive, fs, hidden
):
    data = drive.put("big.bin", noise(20 * MiB))
    if hidden:
        revisions_hidden(drive, "big.bin")
    fs.ls(drive.path())
    drive.asked()
    assert fs.cat_file(drive.path("big.bin")) == data
    assert drive.asked() == [*(["get"] * 3 if hidden else []), *["media"] * 3]
    forget()
    with fsspec.open(drive.url("big.bin")) as file:
        assert file.read() == data
    assert drive.asked() == []


@pytest.mark.parametrize(("hidden", "expected"), [(False, ["media"]), (True, ["get", "media"])])
def test_a_block_of_a_small_file_is_proven_by_its_revision_or_a_second_look(drive, fs, hidden, expected):
    data = drive.put("small.bin", noise(3 * MiB))
    if hidden:
        revisions_hidden(drive, "small.bin")
    fs.ls(drive.path())
    drive.asked()
    assert fs.cat_file(drive.path("small.bin"), MiB, MiB + 100) == data[MiB : MiB + 100]
    assert drive.asked() == expected


def test_64_listed_files_in_one_call_cost_64_requests_then_none(drive, fs):
    data = {drive.path(f"{i}.txt"): drive.put(f"{i}.txt", noise(5000, seed=i)) for i in range(64)}
    assert fs.find(drive.path()) == sorted(data)
    drive.asked()
    assert fs.cat(list(data)) == data
    assert drive.asked() == ["media"] * 64
    forget()
    again = fsspec.filesystem("cdrive")
    assert again.cat(again.find(drive.path())) == data
    assert drive.asked() == []


def test_find_costs_one_listing_a_folder_then_none(drive, fs):
    for i in range(6):
        drive.put(f"{i % 3}/{i}.txt", b"x")
    drive.server.folder(f"{drive.name}/empty")
    # Where the changes of My Drive begin, once; the way to the folder; itself and the four in it.
    for expected in (["change", "get", *["list"] * 6], []):
        assert len(fs.find(drive.path())) == 6
        assert len(fs.find(drive.path(), withdirs=True)) == 11
        assert drive.asked() == expected
    assert fs.ls(drive.path("empty")) == []
    assert drive.asked() == []


def test_absence_is_remembered_and_folder_by_folder(drive, fs):
    drive.put("a/b.txt", b"x")
    for name, expected in (
        ("a/none", ["get", "list", "list", "list"]),
        ("a/nor", ["list"]),
        ("no/x", ["list"]),
    ):
        for asked in (expected, []):
            assert not fs.exists(drive.path(name))
            assert drive.asked() == asked


def test_a_really_new_process_costs_nothing(drive):
    drive.put("a.json", json.dumps({"x": 1}).encode())
    code = """
        import fsspec, json, os
        with fsspec.open(f"cachedfs::drive://My Drive/{os.environ['BUCKET']}/a.json") as f:
            print(json.load(f)["x"])
    """
    assert drive.python(code) == "1\n"
    assert drive.asked() == ["get", "list", "list", "media"]
    assert drive.python(code) == "1\n"
    assert drive.asked() == []


def test_the_way_to_a_file_is_asked_for_at_once_when_it_has_grown_old(drive):
    drive.put("a/b/c.txt", b"x")
    fs = fsspec.filesystem("cdrive", max_age=0)
    fs.cat_file(drive.path("a/b/c.txt"))
    drive.asked()
    drive.server.fail(Fault(times=5, stall_s=0.2))
    assert fs.cat_file(drive.path("a/b/c.txt")) == b"x"
    assert drive.server.peak_concurrency == 5
    assert drive.asked() == ["get", "list", "list", "list", "list"]


def test_an_epoch_over_files_that_were_listed_costs_one_request_when_they_have_grown_old(drive, fs, clock):
    data = {drive.path(f"{i}.txt"): drive.put(f"{i}.txt", noise(500, seed=i)) for i in range(40)}
    fs.find(drive.path())
    assert fs.cat(list(data)) == data
    drive.asked()
    for _ in range(2):
        clock(61)
        assert fs.cat(list(data)) == data
        assert drive.asked() == ["change"]
    clock(61)
    data[drive.path("7.txt")] = drive.put("7.txt", b"replaced")
    drive.delete("8.txt")
    missing = drive.path("8.txt")
    found = fs.cat(list(data), on_error="return")
    assert isinstance(found.pop(missing), FileNotFoundError)
    assert found == {name: content for name, content in data.items() if name != missing}
    assert drive.asked() == ["change", "list", "list", "media"]  # what is at the two names; and the bytes


def test_where_much_changed_in_a_folder_it_is_listed_and_not_asked_about_name_by_name(drive, fs, clock):
    names = [f"{i}.txt" for i in range(30)]
    for name in names:
        drive.put(name, b"old")
    fs.cat(fs.find(drive.path()))
    clock(61)
    data = {drive.path(name): drive.put(name, f"new {name}".encode()) for name in names}
    drive.asked()
    assert fs.cat(list(data)) == data
    assert drive.asked() == ["change", *["list"] * 4, *["media"] * 30]


# What changes.


def test_a_replaced_file_is_read_anew_after_max_age(drive):
    drive.put("a.bin", b"before")
    fs = fsspec.filesystem("cdrive", max_age=0)
    assert fs.cat_file(drive.path("a.bin")) == b"before"
    drive.put("a.bin", b"behind")
    assert fs.cat_file(drive.path("a.bin")) == b"behind"
    drive.put("a.bin", b"newest", new=True)
    assert fs.cat_file(drive.path("a.bin")) == b"newest"


def test_a_folder_that_another_takes_the_name_of_is_seen_after_max_age(drive):
    drive.put("a/x.txt", b"one")
    drive.put("b/x.txt", b"two")
    fs = fsspec.filesystem("cdrive", max_age=0)
    assert fs.cat_file(drive.path("a/x.txt")) == b"one"
    (a,), (b,) = (drive.server.find(f"{drive.name}/{name}") for name in "ab")
    drive.server.edit(a["id"], title="c")
    drive.server.edit(b["id"], title="a")
    assert fs.cat_file(drive.path("a/x.txt")) == b"two"


@pytest.mark.parametrize("hidden", [False, True])
def test_a_handle_never_mixes_two_versions(drive, hidden):
    old, new = noise(24 * MiB, seed=1), noise(24 * MiB, seed=2)
    drive.put("a.bin", old)
    if hidden:
        revisions_hidden(drive, "a.bin")
    fs = fsspec.filesystem("cdrive", read_ahead=0)
    with fs.open(drive.path("a.bin")) as file:
        assert file.read(MiB) == old[:MiB]
        drive.put("a.bin", new)
        file.seek(20 * MiB)
        if hidden:
            with pytest.raises(ObjectChanged, match=r"a\.bin"):
                file.read(MiB)
        else:  # the revision is still there
            assert file.read(MiB) == old[20 * MiB : 21 * MiB]
    fs.invalidate_cache()
    assert fs.cat_file(drive.path("a.bin")) == new


def test_a_write_is_seen_at_once_here_and_by_another_process(drive, fs):
    path = drive.path("new/folder/a.txt")
    assert not fs.exists(path)
    ask = f"""
        import fsspec, sys
        fs = fsspec.filesystem("cdrive")
        for line in sys.stdin:
            print(fs.cat_file({path!r}).decode() if fs.exists({path!r}) else "nothing", flush=True)
    """
    with drive.talking(ask) as other:
        assert other("?") == "nothing"
        for text in (b"one", b"two"):
            fs.pipe_file(path, text)
            assert fs.cat_file(path) == text
            assert other("?") == text.decode()
        fs.rm(drive.path("new"), recursive=True)
        assert other("?") == "nothing"
    assert not fs.exists(path)


def test_many_writes_into_a_new_folder_make_one_folder(drive, fs):
    fs.pipe({drive.path(f"new/er/{i}.txt"): b"%d" % i for i in range(20)})
    assert len(drive.server.find(f"{drive.name}/new")) == 1
    assert len(drive.server.find(f"{drive.name}/new/er")) == 1
    assert len(fs.find(drive.path())) == 20


# What a user meets.


def test_what_cannot_be_read_says_why(drive, fs):
    drive.put("folder/x", b"x")
    drive.server.document(f"{drive.name}/report", "words")
    with pytest.raises(NotDownloadable, match=r"My Drive/.*/report.*document of Google's own"):
        fs.cat_file(drive.path("report"))
    with pytest.raises(IsAFolder, match="folder"):
        fs.cat_file(drive.path("folder"))
    with pytest.raises(ObjectNotFound, match=r"My Drive/.*/none"):
        fs.open(drive.path("none"))
    with pytest.raises(ValueError, match=r"'My Drive', 'shared:NAME'.*'Shared with me' or 'id:ID'"):
        fsspec.open("cdrive://no such start/a").open()
    assert fs.du(drive.path()) == 1


def test_a_shortcut_is_read_as_what_it_points_at(drive, fs):
    data = drive.put("target.bin", noise(300 * KiB))
    (item,) = drive.server.find(f"{drive.name}/target.bin")
    drive.server.shortcut(f"{drive.name}/link", item["id"])
    assert fs.cat_file(drive.path("link")) == data
    assert fs.info(drive.path("link"))["size"] == len(data)


def test_a_shortcut_whose_target_comes_back_is_whole_again_and_a_file_in_its_place_is_no_shortcut(
    drive, clock
):
    fs = fsspec.filesystem("cdrive")
    target, path = drive.server.folder(f"{drive.name}/target"), drive.path("link")
    link = drive.server.shortcut(f"{drive.name}/link", target)
    drive.server.trash(target)
    assert fs.info(path)["dangling"]
    drive.server.trash(target, False)
    clock(61)
    assert (fs.info(path)["type"], fs.info(path).get("dangling")) == ("directory", None)
    drive.server.trash(link)
    drive.server.edit(target, title="link")
    clock(61)
    assert (fs.info(path)["id"], fs.info(path).get("shortcut")) == (target, None)


def test_an_id_is_a_path(drive, fs):
    data = drive.put("folder/x.bin", noise(300))
    (folder,), (item,) = (drive.server.find(f"{drive.name}/{name}") for name in ("folder", "folder/x.bin"))
    assert fs.cat_file(f"id:{item['id']}") == data
    assert fs.find(f"drive://id:{folder['id']}") == [f"id:{folder['id']}/x.bin"]


def test_a_shortcut_to_a_folder_around_it_does_not_go_on_for_ever(drive, fs):
    drive.put("a/b/x.txt", b"x")
    (item,) = drive.server.find(f"{drive.name}/a")
    drive.server.shortcut(f"{drive.name}/a/b/loop", item["id"])
    for _ in range(2):
        assert fs.find(drive.path()) == [drive.path("a/b/x.txt")]
    assert fs.ls(drive.path("a/b/loop"), detail=False) == [drive.path("a/b/loop/b")]


# What libraries do.


def test_pandas_reads_and_writes(base):
    frame = pd.DataFrame({"n": range(100), "x": np.linspace(0, 1, 100)})
    frame.to_parquet(f"{base}/x.parquet")
    frame.to_csv(f"{base}/x.csv", index=False)
    assert pd.read_parquet(f"{base}/x.parquet").equals(frame)
    assert len(pd.read_csv(f"{base}/x.csv")) == 100


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
def test_xarray_writes_and_reads_zarr_with_no_other_argument(base, drive, zarr_format):
    cube = xr.Dataset({"t": (("y", "x"), np.arange(48.0).reshape(6, 8))})
    cube.to_zarr(f"{base}/a.zarr", zarr_format=zarr_format)
    drive.asked()
    for _ in range(2):
        with xr.open_zarr(f"{base}/a.zarr") as found:
            assert found.load().identical(cube)
    drive.asked()
    with xr.open_zarr(f"{base}/a.zarr") as found:
        assert found.load().identical(cube)
    assert drive.asked() == []


def test_a_sharded_array_is_written_and_read(base):
    array = zarr.create_array(f"{base}/s.zarr", shape=(64, 64), chunks=(8, 8), shards=(32, 32), dtype="i4")
    data = np.arange(64 * 64, dtype="i4").reshape(64, 64)
    array[:] = data
    forget()
    assert (zarr.open_array(f"{base}/s.zarr", mode="r")[:] == data).all()


def test_an_hdf5_file_is_read(drive, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("d", data=np.arange(100_000))
    drive.put("a.h5", (tmp_path / "a.h5").read_bytes())
    with fsspec.open(drive.url("a.h5")) as raw, h5py.File(raw, "r") as file:
        assert file["d"][4242] == 4242


def test_moving_is_done_by_drive_and_keeps_the_id(drive, fs):
    for i in range(3):
        drive.put(f"folder/{i}.txt", b"%d" % i)
    before = fs.info(drive.path("folder/1.txt"))["id"]
    fs.find(drive.path())
    drive.asked()
    fs.mv(drive.path("folder"), drive.path("moved"), recursive=True)
    assert drive.asked().count("update") == 1
    assert drive.server.count("copy") == 0
    assert fs.cat_file(drive.path("moved/1.txt")) == b"1"
    assert not fs.exists(drive.path("folder/1.txt"))
    fs.mv(drive.path("moved/1.txt"), drive.path("other.txt"))
    assert fs.info(drive.path("other.txt"))["id"] == before
    assert fs.find(drive.path()) == [drive.path(name) for name in ("moved/0.txt", "moved/2.txt", "other.txt")]


def test_absence_is_told_in_the_words_of_drive(drive, fs):
    drive.server.share_drive("Team")
    for _ in range(2):
        with pytest.raises(
            ObjectNotFound, match=r"cdrive://shared:Tim/x: .*no shared drive of this name, but: Team"
        ):
            fs.cat_file("shared:Tim/x")
        with pytest.raises(ObjectNotFound, match="ask the owner to share it"):
            fs.cat_file("id:none")


def test_a_file_that_nothing_tells_the_versions_of_is_not_cached_and_said_so_once(drive, fs, caplog):
    data = drive.put("a.bin", noise(1000))
    (item,) = drive.server.find(f"{drive.name}/a.bin")
    drive.server.edit(item["id"], md5Checksum=None, headRevisionId=None)
    for _ in range(2):
        assert fs.cat_file(drive.path("a.bin")) == data
        assert "media" in drive.asked()
    said = [record.getMessage() for record in caplog.records if "neither a checksum" in record.getMessage()]
    assert len(said) == 1
    assert drive.path("a.bin") in said[0]


@pytest.mark.parametrize("name", ["google_auth", "credentials"])
def test_a_live_sign_in_does_not_travel(name):
    from google.oauth2.credentials import Credentials

    fs = fsspec.filesystem("cdrive", drive={name: Credentials("secret")}, skip_instance_cache=True)
    with pytest.raises(TypeError, match=f"{name}=: a live Credentials cannot travel.*token="):
        pickle.dumps(fs)


def test_a_wrong_option_of_drive_is_told_when_the_filesystem_is_made():
    with pytest.raises(ValueError, match="'tokn' is unknown; did you mean token"):
        fsspec.filesystem("cdrive", drive={"tokn": "anon"})


def test_what_is_moved_leaves_nothing_of_its_name_behind(drive, fs):
    drive.put("a.txt", b"older")
    drive.put("a.txt", b"newer", new=True)
    fs.mv(drive.path("a.txt"), drive.path("b.txt"))
    assert fs.cat_file(drive.path("b.txt")) == b"newer"
    assert fs.find(drive.path()) == [drive.path("b.txt")]


@pytest.mark.parametrize("evidence", ["revision", "time"])
def test_a_file_that_was_replaced_and_put_back_is_never_a_mixture(drive, evidence):
    first, second = noise(20 * MiB, seed=1), noise(20 * MiB, seed=2)
    drive.put("a.bin", first)
    revisions_hidden(drive, "a.bin")
    (item,) = drive.server.find(f"{drive.name}/a.bin")
    if evidence == "time":
        drive.server.edit(item["id"], headRevisionId=None)
    fs = fsspec.filesystem("cdrive", read_ahead=0, request_size=MiB)
    with fs.open(drive.path("a.bin")) as file:
        assert file.read(MiB) == first[:MiB]
        drive.put("a.bin", second)
        drive.put("a.bin", first)
        if evidence == "time":
            drive.server.edit(item["id"], headRevisionId=None)
        file.seek(10 * MiB)
        with pytest.raises(ObjectChanged):
            file.read(MiB)
    fs.invalidate_cache()
    assert fs.cat_file(drive.path("a.bin")) == first


def test_nothing_is_older_than_max_age_whatever_folder_was_swapped(drive, clock):
    drive.put("a/b/x.txt", b"one")
    drive.put("c/b/x.txt", b"two")
    fs = fsspec.filesystem("cdrive")
    fs.info(drive.path("a/b"))
    clock(50)
    assert fs.cat_file(drive.path("a/b/x.txt")) == b"one"
    (a,), (c,) = (drive.server.find(f"{drive.name}/{name}") for name in "ac")
    drive.server.edit(a["id"], title="d")
    drive.server.edit(c["id"], title="a")
    clock(11)  # the way is 61 s old now, the answer about the file 11
    assert fs.cat_file(drive.path("a/b/x.txt")) == b"two"


def test_a_walk_ends_where_a_shortcut_leads_back(drive, fs):
    drive.put("a/b/x.txt", b"x")
    (item,) = drive.server.find(f"{drive.name}/a")
    drive.server.shortcut(f"{drive.name}/a/b/loop", item["id"])
    for _ in range(2):
        assert [here.removeprefix(drive.path()) for here, _, _ in fs.walk(drive.path())] == ["", "/a", "/a/b"]
        assert fs.ls(drive.path("a/b/loop"), detail=False) == [drive.path("a/b/loop/b")]
        assert fs.find(drive.path(), maxdepth=9) == fs.find(drive.path()) == [drive.path("a/b/x.txt")]


def test_listings_that_are_known_are_served_at_once_while_drive_is_away(drive_server, tmp_path):
    with DriveServer("off") as server:
        server.put("a.txt", b"x")
        fs = fsspec.filesystem(
            "cdrive",
            drive={"token": "anon", "endpoint_url": server.endpoint_url},
            cache_dir=tmp_path,
            max_age=0,
        )
        assert fs.ls("My Drive", detail=False) == ["My Drive/a.txt"]
    assert fs.ls("My Drive", detail=False) == ["My Drive/a.txt"]  # asks, and finds nobody
    requests = fs.stats().requests
    assert fs.ls("My Drive", detail=False) == fs.find("My Drive") == ["My Drive/a.txt"]
    assert fs.stats().requests == requests


@pytest.mark.parametrize("protocol", ["drive", "cdrive"])
def test_half_a_file_is_not_sent_when_its_writer_fails(drive, protocol):
    drive.put("a.txt", b"whole")
    fs = fsspec.filesystem(protocol)
    file = fs.open(drive.path("a.txt"), "wb")
    file.write(b"ha")
    file.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert file.closed
    assert drive.server.get(f"{drive.name}/a.txt") == b"whole"
    with fs.open(drive.path("a.txt"), "wb") as file:
        file.write(b"other")
    assert drive.server.get(f"{drive.name}/a.txt") == b"other"


def test_questions_that_nobody_waits_for_any_more_are_broken_off(drive, fs):
    names = [f"{n:02}" for n in range(33)]
    for name in names:
        drive.put(name, b"data")
    fs.info(drive.path())  # the way is known: one question a file
    drive.server.fail(Fault(kind="list", stall_s=60, times=32))

    async def ask():
        drive.server.reset()
        asked = [asyncio.create_task(fs._info(drive.path(name))) for name in names[:32]]
        # As many as there are threads.
        await asyncio.to_thread(until, lambda: drive.server.count(kind="list") == 16)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        drive.server.heal()
        return await asyncio.wait_for(fs._info(drive.path(names[32])), 20)

    assert asyncio.run(ask())["size"] == 4
