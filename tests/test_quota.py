"""What a quota means for who reads: what is cached is read on, the rest is told at once, and requests stay bounded."""

import errno
import re
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from cachedfs.errors import QuotaExceeded
from cachedfs.sim import DriveServer, Fault
from cachedfs.sim.network import Delay, Profile
from cachedfs.sim.quota import QUOTAS
from tests.fakes import FakeOrigin
from tests.support import Drive, MiB, forget, noise, tally, until

V2 = (
    '{"error": {"code": 403, "message": "The download quota for this file has been exceeded", "errors": '
    '[{"domain": "usageLimits", "reason": "quotaExceeded", "location": "quota.download"}]}}'
)


pytestmark = pytest.mark.usefixtures("real_pace")


@pytest.mark.parametrize("fault", [{"reason": "downloadQuotaExceeded"}, {"body": V2}], ids=["v3", "v2"])
def test_a_used_up_download_quota_is_told_at_once_and_what_is_cached_is_read_on(drive, fault):
    fs = fsspec.filesystem("cdrive", read_ahead=0)  # else the rest would be tried, too
    data = drive.put("big.bin", noise(4 * MiB))
    path = drive.path("big.bin")
    assert fs.cat_file(path, MiB, 2 * MiB) == data[MiB : 2 * MiB]
    drive.server.fail(Fault(kind="media", status=403, times=None, **fault))
    drive.asked()
    with pytest.raises(QuotaExceeded, match=r"up to 24 hours.*cached can be read on.*copy") as caught:
        fs.cat_file(path, 2 * MiB, 4 * MiB)
    assert caught.value.errno == errno.EDQUOT
    assert drive.asked().count("media") == 1
    assert fs.cat_file(path, MiB, 2 * MiB) == data[MiB : 2 * MiB]
    with fs.open(path) as file:
        file.seek(MiB + 5)
        assert file.read(100) == data[MiB + 5 : MiB + 105]
    forget()
    again = fsspec.filesystem("cdrive")
    assert again.cat_file(path, MiB, 2 * MiB) == data[MiB : 2 * MiB]
    assert "media" not in drive.asked()


@pytest.mark.parametrize("options", [{}, {"read_ahead": 0}])
def test_every_read_asks_for_a_bounded_range(drive, tmp_path, options):
    """An open-ended request is charged as the whole file, even if it is broken off."""
    fs = fsspec.filesystem("cdrive", **options)
    data = drive.put("big.bin", noise(20 * MiB))
    path, uncached = drive.path("big.bin"), fsspec.filesystem("drive")
    for name in ("small", "other", "third"):
        drive.put(name, noise(1000))
    with fs.open(path) as file:
        assert file.read(10) == data[:10]
        file.seek(-10, 2)
        assert file.read() == data[-10:]
    assert fs.cat_file(path, -100) == data[-100:]
    assert fs.cat_ranges([path, path], [5, MiB], [9, None]) == [data[5:9], data[MiB:]]
    assert fs.cat([drive.path("small"), drive.path("other")])
    fs.get(drive.path("third"), str(tmp_path / "third"))
    fs.head(path)
    fs.tail(path)
    assert uncached.cat_file(path) == data
    assert uncached.cat_file(path, -7) == data[-7:]
    with uncached.open(path) as file:
        assert file.read() == data
    uncached.get(path, str(tmp_path / "b/big"))
    ranges = [r.headers.get("range", "") for r in drive.server.requests if r.kind == "media"]
    assert len(ranges) >= 10
    assert [text for text in ranges if not re.fullmatch(r"bytes=\d+-\d+", text)] == []


# All processes of a machine

NEW = Profile(name="new", media=Delay(0.05), quota=QUOTAS["units"])
READ = """
    import fsspec, sys
    fs = fsspec.filesystem("cdrive")
    names = fs.ls("My Drive/many", detail=False)
    start = int(sys.argv[1])
    print(len(fs.cat(names[start : start + 45])))
"""


@pytest.fixture
def machine(own_cache, monkeypatch):
    """A machine, and a Drive that takes 27 downloads a second and tells nobody."""
    with DriveServer(NEW) as server:
        options = {"token": "anon", "endpoint_url": server.endpoint_url}
        monkeypatch.setitem(fsspec.config.conf, "drive", options)
        server.fill(server.folder("many"), 180, size=500)
        yield Drive(server, "many", own_cache)


def refused(machine):
    """Return how many requests were refused since the last look, and forget them."""
    n = sum(request.status == 403 for request in machine.server.requests)
    machine.server.reset()
    return n


def test_what_one_process_learns_of_the_quota_the_next_one_knows(machine):
    fs = fsspec.filesystem("cdrive")
    names = fs.ls("My Drive/many", detail=False)
    assert len(fs.cat(names[:54])) == 54
    assert 0 < refused(machine) <= 16 + 16  # what was on its way when it was noticed
    assert machine.python(READ, "60") == "45\n"
    assert refused(machine) == 0


@pytest.mark.stress
def test_processes_find_the_quota_together(machine):
    machine.python('import fsspec; fsspec.filesystem("cdrive").ls("My Drive/many")')
    refused(machine)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda i: machine.python(READ, str(45 * i)), range(3))) == ["45\n"] * 3
    n = refused(machine)
    tally("requests refused while three processes found a quota", n)
    assert n <= 3 * 16 + 16
    assert machine.python(READ, "135") == "45\n"
    assert refused(machine) == 0


# Reading ahead


def test_reading_ahead_waits_while_requests_are_scarce_and_reading_does_not(monkeypatch):
    origin = FakeOrigin()
    origin.install(monkeypatch)
    data = origin.put("b/big", noise(20 * MiB))
    origin.spare_in_s = 0.01
    fs = fsspec.filesystem("cachedfs", target_protocol="gs")
    with fs.open("b/big") as file:
        for _ in range(9):
            file.read(MiB)
        alone = len(origin.log)
        assert alone == 2  # the first eight, and the one that was waited for
        origin.spare_in_s = 0.0
        until(lambda: len(origin.log) > alone)
        assert file.read() == data[9 * MiB :]
