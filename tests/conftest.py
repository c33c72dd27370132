"""Fixtures for every test: its own cache directory, fsspec configuration and simulated clouds."""

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import pwd
import signal
import tempfile
import time
import zlib

import fsspec
import fsspec.config
import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from cachedfs.common.clock import clock as metadata_clock
from cachedfs.core import engines
from cachedfs.origins import http
from cachedfs.origins.drive import quota
from cachedfs.origins.drive.quota import RateLimit
from cachedfs.origins.retry import RetryPolicy
from cachedfs.sim import DriveServer, GCSServer
from tests.fakes import FakeOrigin
from tests.fork_server import ForkServer
from tests.support import NAMES, OURS, S3, Cloud, Drive, item_threads, tallied, tally, until

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else gcsfs's library logs each fork of this process
FIRST_PORT = 21000  # below those that the system gives to whoever asks for any
PAUSE_S = quota._PAUSE_S
LADDERS = {name: getattr(quota, name) for name in ("CREATES", "REQUESTS")}

# The time of an example depends on the machine. The suite runs the same examples each time, `make stress` others.
for name, is_same in {"suite": True, "explore": False}.items():
    hypothesis.settings.register_profile(
        name,
        deadline=None,
        derandomize=is_same,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("suite")


def pytest_configure(config):
    """Let examples not depend on which modules other tests import: Hypothesis tries the constants in them."""
    if config.getoption("--hypothesis-profile") != "explore":
        providers._get_local_constants = providers.Constants


# A shell that starts the suite in the background makes it, and all its children, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist
        session.config.workeroutput["tally"] = tallied()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for what, n in getattr(node, "workeroutput", {}).get("tally", {}).items():
        tally(what, n)


def pytest_terminal_summary(terminalreporter):
    if counts := tallied():
        terminalreporter.section("counted")
        for what, n in sorted(counts.items()):
            terminalreporter.write_line(f"{n:>12,}  {what}")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Use a fresh cache directory for all filesystems of the test, and leave nothing running."""
    directory = tmp_path / "cache"
    monkeypatch.setitem(fsspec.config.conf, "cachedfs", {"cache_dir": str(directory), "keep_free": 0})
    monkeypatch.setattr(metadata_clock, "offset", -math.inf)  # an earlier test may have moved the wall clock
    before = item_threads()
    yield directory
    engines._close_all()
    until(lambda: item_threads() <= before)
    for cls in OURS:
        cls.clear_instance_cache()


@pytest.fixture(autouse=True)
def own_memory_folder(monkeypatch):
    """Keep change counters that have no place on disk out of the memory folder of the machine; return the folder."""
    with tempfile.TemporaryDirectory(prefix="cachedfs-") as folder:
        monkeypatch.setattr("cachedfs.cache.change_counters.MEMORY_FOLDER", folder)
        yield pathlib.Path(folder)


@pytest.fixture(autouse=True)
def no_saved_accounts(tmp_path, monkeypatch):
    """Hide the sign-ins that the user of this machine saved."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def no_home(tmp_path, monkeypatch):
    """Be a user with neither HOME nor an entry in the password file; return an empty temporary folder of the system."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def no_rate_limits(monkeypatch):
    """Remove the rate limits of Drive, except where a test uses `default_rate_limits`: tests send thousands of requests."""
    for ladder in LADDERS:
        monkeypatch.setattr(quota, ladder, (RateLimit(1e9, 60.0), RateLimit(1e9, 60.0)))
    monkeypatch.setattr(quota, "_PAUSE_S", 0.0)


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch):
    """Wait long for answers and connections: pauses of the machine would change exact counts."""
    patient = functools.partial(RetryPolicy, media_s=3600.0, metadata_s=3600.0)
    monkeypatch.setattr("cachedfs.origins.drive.connection.RetryPolicy", patient)
    timeouts_of, usual = http.timeouts_of, RetryPolicy()

    def patient_timeouts(policy, **options):
        names = ("connect_s", "reach_s", "reach_stale_s")
        longer = {name: 60.0 for name in names if getattr(policy, name) == getattr(usual, name)}
        return timeouts_of(dataclasses.replace(policy, **longer), **options)

    monkeypatch.setattr(http, "timeouts_of", patient_timeouts)


@pytest.fixture(autouse=True)
def patient_requests(monkeypatch):
    """Keep a request open while its reader pauses: a busy machine would otherwise send two requests."""
    monkeypatch.setattr("cachedfs.core.downloads.PATIENCE_S", 60.0)


@pytest.fixture
def default_patience(patient_requests, monkeypatch):
    """End a request soon after its reader pauses, as by default."""
    monkeypatch.setattr("cachedfs.core.downloads.PATIENCE_S", 0.2)


@pytest.fixture
def default_rate_limits(no_rate_limits, monkeypatch):
    """Use the default rate limits of Drive."""
    for ladder, usual in LADDERS.items():
        monkeypatch.setattr(quota, ladder, usual)
    monkeypatch.setattr(quota, "_PAUSE_S", PAUSE_S)


@pytest.fixture(scope="session")
def fork_server():
    """A process that forks children quickly."""
    fork_server = ForkServer("tests.cache.kills", "cachedfs.filesystem")
    yield fork_server
    fork_server.close()


@pytest.fixture
def folder(tmp_path_factory):
    """A folder in memory where possible: closing an index waits for the disk."""
    memory = pathlib.Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path_factory.mktemp("folder")
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="cachedfs-") as name:
        yield pathlib.Path(name)


@pytest.fixture
def clock(monkeypatch):
    """Move the wall clock: `clock(61)` is a minute later."""
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])

    def later(seconds):
        shift[0] += seconds

    return later


@pytest.fixture
def origin(own_cache, monkeypatch):
    """An origin in memory that replaces all others."""
    fake = FakeOrigin()
    fake.install(monkeypatch)
    return fake


def simulated(kind, number):
    """Return a simulated cloud, on a port of this worker unless that is taken.

    Ports and names are the same in each run. They are part of what change counters are chosen by, and two paths that
    share one cost a request more.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    try:
        return kind(profile="off", port=FIRST_PORT + 10 * worker + number).start()
    except OSError:  # another run of the tests has it
        return kind(profile="off").start()


def own_name(request):
    """Return a name for a bucket or a folder of this test."""
    return f"test-{zlib.crc32(request.node.nodeid.encode())}"


@pytest.fixture(scope="session")
def gcs_server():
    with contextlib.closing(simulated(GCSServer, 0)) as server:
        yield server


@pytest.fixture
def cloud(gcs_server, own_cache, monkeypatch, request):
    """A simulated GCS with an empty bucket for this test; `gs` is configured to use it."""
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "endpoint_url": gcs_server.endpoint_url})
    monkeypatch.delenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", raising=False)
    gcs_server.heal()
    bucket = own_name(request)
    gcs_server.make_bucket(bucket)
    gcs_server.reset()
    yield Cloud(gcs_server, bucket, own_cache)
    gcs_server.heal()


@pytest.fixture
def fs(cloud):
    """Simulated GCS through the cache, with the default options."""
    return fsspec.filesystem("cachedfs", target_protocol="gs")


@pytest.fixture(scope="session")
def drive_server():
    with contextlib.closing(simulated(DriveServer, 1)) as server:
        yield server


@pytest.fixture
def drive(drive_server, own_cache, monkeypatch, request):
    """A simulated Drive with an empty folder for this test; `drive` is configured to use it."""
    monkeypatch.setitem(
        fsspec.config.conf, "drive", {"token": "anon", "endpoint_url": drive_server.endpoint_url}
    )
    drive_server.heal()
    folder = own_name(request)
    drive_server.folder(folder)
    drive_server.reset()
    yield Drive(drive_server, folder, own_cache)
    drive_server.heal()


@pytest.fixture(scope="session")
def s3_server():
    for package in ("s3fs", "moto"):
        pytest.importorskip(package)
    from botocore.loaders import JSONFileLoader

    from tests.s3_server import S3Server

    load = functools.cache(JSONFileLoader().load_file)  # each client reads the description of S3, for 0.2 s
    with contextlib.closing(simulated(S3Server, 2)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda self, path: load(path))
        yield server


@pytest.fixture
def s3(s3_server, own_cache, monkeypatch, request):
    """A simulated S3 with an empty bucket for this test; `s3` is configured to use it."""
    machine = S3(s3_server, own_name(request), own_cache)
    monkeypatch.setitem(fsspec.config.conf, "s3", machine.options["s3"])
    s3_server.make_bucket(machine.name)
    s3_server.reset()
    yield machine
    s3_server.heal()


@pytest.fixture(params=[*NAMES, "cachedfs::memory://", "cachedfs::file://"])
def base(request, cloud, drive, tmp_path, monkeypatch):
    """A URL under which a test may write and read, in each form of a cloud, and on other filesystems."""
    if request.param == "cachedfs::file://":
        # Zarr writes into folders that it never creates; local files need this option of fsspec for it.
        monkeypatch.setitem(fsspec.config.conf, "file", {"auto_mkdir": True})
        (tmp_path / "data").mkdir()
        return f"cachedfs::file://{tmp_path}/data"
    if request.param == "cachedfs::memory://":
        fsspec.filesystem("memory").store.clear()
        return "cachedfs::memory://data"
    return (drive if "drive" in request.param else cloud).url("data", request.param)
