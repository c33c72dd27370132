"""Google Drive's daily quota: what an account uses, a warning, and a limit of one's own."""

import errno
import zoneinfo
from datetime import UTC, datetime
from unittest.mock import Mock

import pytest

from cachedfs.common.types import Range
from cachedfs.errors import ObjectNotFound, QuotaExceeded
from cachedfs.origins.drive import quota
from cachedfs.origins.drive.options import DriveOptions
from cachedfs.origins.drive.quota import BYTES_A_DAY, UNITS_A_DAY, QuotaMeter, QuotaStats, day_of, end_of
from cachedfs.sim import Fault
from tests.fakes import FakeClock
from tests.origins.contract import read

DAY = "2026-11-25"


@pytest.fixture
def clock():
    """A clock that stands still at noon of DAY in Pacific time."""
    clock = FakeClock()
    clock.now = datetime(2026, 11, 25, 20, tzinfo=UTC).timestamp()
    return clock


# Days
@pytest.mark.parametrize(
    ("at", "day", "end"),
    [
        ("2026-11-25T07:59:59", "2026-11-24", "2026-11-25 08:00 UTC"),
        ("2026-11-25T08:00:00", "2026-11-25", "2026-11-26 08:00 UTC"),
        ("2026-07-01T06:59:59", "2026-06-30", "2026-07-01 07:00 UTC"),
        ("2026-11-01T12:00:00", "2026-11-01", "2026-11-02 08:00 UTC"),  # summer time ends
    ],
)
def test_a_day_begins_at_midnight_pacific_time(at, day, end):
    assert day_of(datetime.fromisoformat(f"{at}+00:00").timestamp()) == day
    assert end_of(day) == end


def test_without_time_zones_a_day_begins_at_eight_utc(monkeypatch):
    monkeypatch.setattr(zoneinfo, "ZoneInfo", Mock(side_effect=zoneinfo.ZoneInfoNotFoundError))
    monkeypatch.setattr(quota, "_zone", quota._zone.__wrapped__)  # without its cache
    assert day_of(datetime(2026, 7, 1, 7, 59, tzinfo=UTC).timestamp()) == "2026-06-30"
    assert end_of("2026-06-30") == "2026-07-01 08:00 UTC"


# Counting
async def test_answered_requests_count_and_refusals_for_their_rate_do_not(make, server, folder, root, clock):
    server.put(f"{folder}/a", b"a" * 1000)
    meter = QuotaMeter(clock=clock)
    origin = make(meter=meter)
    here = await origin.lookup(root)
    assert meter.today().units == 100  # a query for the name
    [info] = [info async for info in origin.list(root, here)]
    assert meter.today().units == 200
    before = meter.today()
    assert (await read(origin, f"{root}/a", Range(0, 1000), info))[0] == b"a" * 1000
    assert meter.today() == before.plus(200, 1000)
    for nth, refusal in enumerate(({"status": 429}, {"status": 403, "reason": "userRateLimitExceeded"}), 1):
        server.fail(Fault(kind="media", nth=nth, **refusal))
    server.fail(Fault(kind="media", nth=3, status=503))
    await read(origin, f"{root}/a", None, info)
    assert meter.today().units == before.units + 200 + 400
    with pytest.raises(ObjectNotFound):
        await origin.account.item("nothing", root)
    assert meter.today().units == before.units + 200 + 400 + 5


# Storing
class Store:
    """Sums that meters share."""

    def __init__(self):
        self.sums = {}
        self.soon = []
        self.is_full = False

    def load(self, day):
        return self.sums.get(day, (0, 0))

    def add(self, day, units, n_bytes):
        if self.is_full:
            raise OSError
        before = self.load(day)
        self.sums[day] = before[0] + units, before[1] + n_bytes
        return self.sums[day]

    def meter(self, clock):
        return QuotaMeter(load=self.load, add=self.add, soon=self.soon.append, clock=clock)


def test_meters_of_one_account_add_up(clock):
    store = Store()
    one, other = store.meter(clock), store.meter(clock)
    one.count("list", 1)
    one.count("list", 1)
    other.count("download", 1000)
    assert len(store.soon) == 2, "once for each, however many requests"
    one.store()
    other.store()
    assert other.today() == store.meter(clock).today() == QuotaStats(DAY, 400, 1002)
    assert one.today() == QuotaStats(DAY, 200, 2)
    one.refresh()
    assert one.today() == QuotaStats(DAY, 400, 1002)
    one.count("get", 0)
    assert len(store.soon) == 3


def test_what_cannot_be_stored_is_kept(clock):
    store = Store()
    meter = store.meter(clock)
    meter.count("list", 1)
    store.is_full = True
    with pytest.raises(OSError):
        meter.store()
    clock.now += 12 * 3600
    meter.count("list", 2)
    store.is_full = False
    meter.store()
    assert store.sums == {DAY: (100, 1), "2026-11-26": (100, 2)}
    assert meter.today() == QuotaStats("2026-11-26", 100, 2)


# A warning
@pytest.mark.parametrize("used", [(int(0.8 * UNITS_A_DAY) - 200, 0), (0, int(0.8 * BYTES_A_DAY) - 1)])
def test_a_warning_at_80_per_cent_once_a_day(clock, caplog, used):
    store = Store()
    store.sums = {DAY: (used[0] - 200, used[1] - 1), "2026-11-26": used}
    meter = store.meter(clock)
    meter.count("download", 1)
    assert caplog.messages == []
    meter.count("download", 1)
    meter.count("download", 1)
    [warning] = caplog.messages
    assert "(80.0 %)" in warning
    clock.now += 12 * 3600
    meter.refresh()
    meter.count("download", 1)
    assert len(caplog.messages) == 2


# A limit
def limited(clock):
    """Return a meter at 200 units below a half of the daily quota."""
    store = Store()
    store.sums[DAY] = UNITS_A_DAY // 2 - 200, 0
    return store.meter(clock)


async def test_speculation_stops_at_the_limit_until_the_day_ends(make, server, folder, root, clock, caplog):
    server.put(f"{folder}/a", b"a")
    meter = limited(clock)
    origin = make(meter=meter, daily_limit=0.5)
    assert origin.spare_s() == 0
    meter.count("download", 1)
    assert origin.spare_s() == origin.spare_s() == 1
    [warning] = caplog.messages
    assert warning == (
        "Google Drive: daily_limit=0.5 is reached (200,000,000 of 400,000,000 quota units (50.0 %) and 1 B of 1 TB "
        "(0.0 %)): read-ahead and prefetches stop until 2026-11-26 08:00 UTC"
    )
    assert (await read(origin, f"{root}/a"))[0] == b"a"
    assert make(meter=meter).spare_s() == 0, "no limit by default"
    clock.now += 12 * 3600
    assert origin.spare_s() == 0


async def test_everything_stops_at_the_limit_until_the_day_ends(make, server, folder, root, clock):
    server.put(f"{folder}/a", b"a")
    meter = limited(clock)
    origin = make(meter=meter, daily_limit="0.5", daily_limit_stops="everything")
    meter.count("download", 1)
    server.reset()
    with pytest.raises(QuotaExceeded) as caught:
        await origin.lookup(f"{root}/a")
    assert caught.value.errno == errno.EDQUOT
    assert str(caught.value) == (
        "drive://My Drive: looking it up is stopped by the drive option daily_limit=0.5, as 200,000,000 of 400,000,000 "
        "quota units (50.0 %) and 1 B of 1 TB (0.0 %) are used today. Cached data can still be read, also expired data "
        "with offline=True. The day ends at 2026-11-26 08:00 UTC; raise daily_limit to go on"
    )
    assert server.requests == []
    assert origin.spare_s() == 1
    clock.now += 12 * 3600
    assert (await read(origin, f"{root}/a"))[0] == b"a"


def test_a_limit_is_a_share():
    for value in (0, 1.01, "half", True, float("nan")):
        with pytest.raises(ValueError, match="daily_limit="):
            DriveOptions.of({"daily_limit": value})
    assert DriveOptions.of({"daily_limit": "0.25"}).daily_limit == 0.25
    with pytest.raises(
        ValueError, match="daily_limit_stops='reads': expected one of speculation, everything"
    ):
        DriveOptions.of({"daily_limit_stops": "reads"})
