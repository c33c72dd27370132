"""The simulated clouds: where their data are, how they are served, and who can read them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cachedfs.sim import PROFILES, Delay, DriveServer, GCSServer, Profile
from cachedfs.sim.quota import QUOTAS
from tests.benchmarks import data

BUCKET = "bench"
TIME_SCALE = "BENCHMARK_TIME_SCALE"  # the variable with the simulated seconds of the service per real second
MOUNT = "mountmodel://"  # of local files
TENSORSTORE = "tensorstore://"  # not a filesystem: it reads arrays itself
Server = GCSServer | DriveServer


@dataclass(frozen=True, slots=True)
class Service:
    """A simulated cloud; all its contenders read the same data with the same code."""

    server: type[Server]
    top: str  # the part of a URL between `://` and a key
    folder: str  # the folder that the server serves, below the benchmark's
    variables: str  # prefix of the environment variables that configure fsspec for it
    contenders: dict[str, str | None]  # the start of its URLs; None: no fsspec filesystem
    modules: tuple[str, ...]  # imported before the clock starts
    make: Callable[[Path], None]

    def local(self, folder: Path) -> Path:
        """Return the folder with the same data."""
        return folder / self.folder / BUCKET

    def base(self, contender: str, folder: Path) -> str:
        """Return the start of a contender's URLs, or the folder with the same data."""
        prefix, local = self.contenders[contender], str(self.local(folder))
        if prefix is None:
            return local
        return f"{prefix}{local if prefix == MOUNT else self.top}"

    def environment(self, server: Server) -> dict[str, str]:
        url = server.endpoint_url
        theirs = {"TENSORSTORE_GCS_HTTP_URL": url, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "t"}
        ours = {TIME_SCALE: str(server.time_scale)}
        return {f"{self.variables}_TOKEN": "anon", f"{self.variables}_ENDPOINT_URL": url, **theirs, **ours}


SERVICES = {
    "gcs": Service(
        GCSServer,
        BUCKET,
        "cloud",
        "FSSPEC_GS",
        {
            "local": None,
            "gcsfs": "gs://",
            "blockcache": "blockcache::gs://",
            "filecache": "filecache::gs://",
            "simplecache": "simplecache::gs://",
            "obstore": "obstoregs://",
            "tensorstore": TENSORSTORE,
            "floor": None,
            "cachedfs": "cachedfs::gs://",
        },
        # fsspec itself imports gcsfs for every URL with `gs://` in it.
        (
            "aiohttp",
            "fsspec.implementations.cached",
            "gcsfs",
            "tests.benchmarks.obstored",
            "cachedfs.filesystem",
        ),
        data.make,
    ),
    "drive": Service(
        DriveServer,
        f"My Drive/{BUCKET}",
        "drive",
        "FSSPEC_DRIVE",
        {
            "local": None,
            "mount": MOUNT,
            "pydrive2": "pydrive2://",
            "gdrive": "gdrivefsspec://",
            "drive": "drive://",
            "cachedfs": "cachedfs::drive://",
        },
        (
            "aiohttp",
            "tests.benchmarks.drive_peers",
            "tests.benchmarks.mount",
            "cachedfs.origins.drive.filesystem",
            "cachedfs.filesystem",
        ),
        data.make_for_drive,
    ),
}


def mean(delay: Delay) -> Delay:
    """Return a delay that is always the mean of this one."""
    return Delay(delay.median_s * math.exp(delay.sigma**2 / 2))


def even(profile: Profile) -> Profile:
    """Return the profile without randomness, whose results can be computed."""
    return dataclasses.replace(
        profile,
        name="drive-even",
        metadata=mean(profile.metadata),
        media=mean(profile.media),
        listing=mean(profile.listing),
        error_rate=0.0,
        stall_rate=0.0,
    )


# Stalls of 30 s would only add noise.
DRIVE_TYPICAL = dataclasses.replace(PROFILES["drive-typical"], stall_rate=0.0)
DRIVE_EVEN = even(PROFILES["drive-typical"])
# The two published days with 12,000 requests a minute; one with 1,625 downloads a minute and no other errors.
DRIVE_OLD = dataclasses.replace(PROFILES["drive-typical"], name="drive-old", quota=QUOTAS["requests"])
DRIVE_BAD = dataclasses.replace(PROFILES["drive-bad"], name="drive-bad-old", quota=QUOTAS["requests"])
DRIVE_UNITS = dataclasses.replace(
    PROFILES["drive-typical"], name="drive-units", quota=QUOTAS["units"], error_rate=0.0, stall_rate=0.0
)
DRIVE_FIXED = dataclasses.replace(DRIVE_UNITS, quota=dataclasses.replace(QUOTAS["units"], minute="fixed"))
# Beside a program that always gets its half of the quota.
DRIVE_HALF = dataclasses.replace(
    DRIVE_UNITS, quota=dataclasses.replace(QUOTAS["units"], units_per_user=162_500)
)
DRIVE_DAY = PROFILES["drive-bad"]
DRIVE_CALM = dataclasses.replace(DRIVE_TYPICAL, name="drive-calm", error_rate=0.0)
# The profile of the table with constant latency, for bounds in multiples of one request.
EVEN = dataclasses.replace(
    PROFILES["table"], name="even", metadata=Delay(0.045), media=Delay(0.045), listing=Delay(0.045)
)


def ideal_s(latencies: list[float], in_flight: int) -> float:
    """Return when the last of these requests ends if each starts, in order, as soon as one of n slots is free."""
    free_at = [0.0] * in_flight
    for latency in latencies:
        slot = free_at.index(min(free_at))
        free_at[slot] += latency
    return max(free_at)
