"""The command `doctor`."""

import dataclasses
import errno
import json
import os
import re
from unittest import mock

import fsspec
import fsspec.config
import pytest

from cachedfs.cache.counters import Counted
from cachedfs.cli import doctor
from cachedfs.cli.speed import Speeds, facts, read_at_once
from cachedfs.cli.stats import is_too_small
from cachedfs.mount.unsent_files import keep
from cachedfs.report.analysis import RunFigures
from tests.cli.helpers import json_of, run
from tests.support import MiB, noise

OF_READS = ["first byte", "one request", "at once", "settings", "limit", "to set"]


def checks(*arguments, status=0):
    """Return the checks of a doctor by their names."""
    return {
        check["name"]: check
        for check in json.loads(run("doctor", "--json", *arguments, status=status).stdout)
    }


def failing(*arguments):
    """Return what the failed checks found, by their names."""
    found = checks(*arguments, status=1).items()
    return {name: check["found"] for name, check in found if check["state"] == "fail"}


def test_doctor_finds_all_well(cloud):
    cloud.put("key", noise(9 * MiB))
    found = checks(cloud.url("key", "gs://"))
    # The disk under the tests may be slow.
    assert {check["state"] for check in found.values()} <= {"ok", "warn"}
    assert list(found)[-8:] == ["access", "metadata", *OF_READS]
    assert str(cloud.cache_dir) in found["cache directory"]["found"]
    assert re.search(r"\b8\.4 MB in \d+ ms", found["one request"]["found"])
    assert "Too small" not in found["one request"]["advice"]
    cloud.put("small", noise(1000))
    assert "Too small" in checks(cloud.url("small", "gs://"))["one request"]["advice"]
    assert "at a time" in found["settings"]["found"]
    assert json_of("stats")["blocks"] == 0, "past the cache"


def test_doctor_names_the_files_of_a_mount_that_were_not_sent(cloud, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert "unsent files" not in checks()
    (tmp_path / "file").write_bytes(b"1" * 500)
    for name in ("b/old", "b/new"):
        with (tmp_path / "file").open("rb") as file:
            keep(file, name)
    check = checks()["unsent files"]
    assert check["state"] == "warn"
    assert re.match("2 files, 1.0 kB, .*; the newest is .*-b_new$", check["found"])


def test_doctor_fails_with_the_real_error(cloud):
    result = run("doctor", cloud.url("nothing", "gs://"), status=1)
    assert re.search(r"^fail +access .*nothing", result.stdout, re.MULTILINE)
    cloud.server.forbid(cloud.bucket)
    check = checks(cloud.url("key", "gs://"), status=1)["access"]
    assert (check["state"], "anon" in check["advice"]) == ("fail", True)


def test_doctor_says_who_signs_in_at_drive_and_what_they_may_do(drive, tmp_path, monkeypatch):
    drive.put("f/big.bin", noise(9 * MiB))
    (item,) = drive.server.find(f"{drive.name}/f/big.bin")
    drive.server.edit(item["id"], capabilities={"canEdit": False, "canTrash": False})
    found = checks(drive.url("f/big.bin"))
    of_drive = ["identity", "account", "access", "rights", "metadata", *OF_READS]
    assert list(found)[list(found).index("identity") :] == of_drive
    assert found["identity"]["found"] == "anonymous"
    assert found["account"]["found"] == "me@example.com; 0 bytes used of 16.1 GB"
    assert found["rights"]["found"] == "this account may read"
    assert "27 if its project" in found["settings"]["found"]
    assert checks(drive.url("f"))["rights"]["found"] == "this account may read, list, change, add to, remove"
    for url in ("drive://", "drive://Shared with me", "drive://My Drive"):
        assert {check["state"] for check in checks(url).values()} <= {"ok", "warn"}


def test_doctor_names_the_faster_keys_of_an_array_whose_chunks_are_in_folders(drive):
    for key in ("nested/zarr.json", "nested/c/0/0", "nested/c/0/1", "flat/zarr.json", "flat/c/0", "flat/c/1"):
        drive.put(key, b"x")
    check = checks(drive.url("nested"))["chunks"]
    assert (check["state"], '"separator": "."' in check["advice"]) == ("warn", True)
    assert "chunks" not in checks(drive.url("flat"))


@pytest.mark.parametrize(
    ("scopes", "state", "found"),
    [
        (["drive"], "ok", "drive: reading and writing"),
        (["cloud-platform", "drive.readonly"], "warn", "drive.readonly: reading; writes are refused"),
        (["cloud-platform"], "fail", "none of Drive's (cloud-platform)"),
    ],
)
def test_doctor_knows_what_a_sign_in_is_good_for(drive, tmp_path, scopes, state, found):
    saved = {
        "access_token": "ya29.x", "client_id": "me.apps", "client_secret": "SECRET", "refresh_token": "SECRET",
        "token_expiry": None, "token_uri": f"{drive.server.endpoint_url}/token",
        "scopes": [f"https://www.googleapis.com/auth/{scope}" for scope in scopes],
    }  # fmt: skip
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    told = checks("-o", f"token={tmp_path}/saved.json", drive.url(), status=state == "fail")
    assert told["identity"]["found"].startswith("saved OAuth credentials of client me.apps")
    assert (told["scopes"]["state"], told["scopes"]["found"]) == (state, found)
    assert "SECRET" not in str(told)


def test_doctor_says_that_a_sign_in_at_drive_has_expired(drive):
    drive.server.require_token("another")
    found = checks("-o", "token=ya29.old", drive.url(), status=1)
    drive.server.require_no_token()
    assert found["account"]["state"] == "fail"
    assert "it has expired or was revoked: pass a new one" in found["access"]["found"]


def test_doctor_names_what_is_wrong_with_the_cache(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert "cache directory" in failing("--cache-dir", str(tmp_path / "file" / "x"))
    assert "room" in failing("-o", "cache_size=1000")
    monkeypatch.setitem(fsspec.config.conf, "cachedfs", {"cache_sise": 1})
    assert "did you mean 'cache_size'?" in failing()["cache"]


def test_doctor_says_what_to_do_on_a_full_disk(monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(doctor.os, "fsync", full)
    found = checks(status=1)
    assert found["write speed"]["state"] == "fail"
    assert found["write speed"]["found"].endswith("cannot be written: No space left on device")
    assert "Free space on this disk, or set cache_dir" in found["write speed"]["advice"]
    assert "index" in found, "the other checks go on"


def test_doctor_shows_options_and_environment_without_secrets(monkeypatch):
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "SECRET")
    monkeypatch.setenv("FSSPEC_GS_ENDPOINT_URL", "http://me:SECRET@127.0.0.1:1")
    found = checks("-o", "max_age=immutable", "-o", "cache_size=500MB")
    assert "FSSPEC_GS_TOKEN" in found["environment"]["found"].split(", ")
    assert "FSSPEC_GS_ENDPOINT_URL=http://" in found["environment"]["found"]
    assert "SECRET" not in str(found)
    assert "max_age=immutable" in found["options"]["found"]
    assert "cache_size=500.0 MB" in found["options"]["found"]


def test_doctor_says_how_fast_reads_can_be():
    run = RunFigures(elapsed_s=1.0, latency_s=0.05, n_at_once=16, bytes_per_s=150e6, n_to_fill=3)
    one_by_one = (
        "Small objects one by one: 20 a second; as a list by fs.cat, 16 in flight: up to 320 a second."
    )
    known = f"{one_by_one} The link gives 150.0 MB/s; 3 requests at a time fill it."
    assert facts(run, 50e6) == known
    run = dataclasses.replace(run, size=4 * 10**9, held=0.25, n_files=9)
    share = "Of 4.0 GB here the cache holds 25.0 %: that share of each further epoch is hits."
    assert facts(run, 50e6) == f"{known} {share}"
    needed = "3 requests at a time would fill a link of 1 Gbit/s, 30 one of 10."
    assert facts(dataclasses.replace(run, n_to_fill=None, held=None), 50e6) == f"{one_by_one} {needed}"


@pytest.mark.parametrize(("all_per_s", "n"), [(150e6, 3), (50e6, 1), (320e6, 7), (390e6, None)])
def test_what_fills_the_link_is_known_only_if_more_requests_are_no_faster(all_per_s, n):
    speeds = Speeds(0.05, size=50, whole_s=1e-6, n=8, at_once=int(all_per_s), took_s=1.0)
    assert speeds.n_to_fill == n
    assert speeds._replace(at_once=0, took_s=0.0).n_to_fill is None, "too small to tell"


def test_a_full_cache_that_evicts_what_comes_is_too_small():
    counted = Counted(hits=10, misses=100, requests=100, evictions=90, since=1.0)
    assert is_too_small(counted, 95, 100)
    assert not is_too_small(counted, 10, 100), "evicted by somebody's command"
    assert not is_too_small(counted._replace(evictions=10), 95, 100)


def test_doctor_measures_the_link_and_says_what_to_set(cloud, tmp_path):
    for i in range(3):
        cloud.put(f"d/{i}", noise(7 * MiB, i))
    url = cloud.url("d", "gs://")
    found = {name: check["found"] for name, check in checks(url).items()}
    assert re.match(r"8 requests, .* in \d+ ms: ", found["at once"])
    assert "Of 22.0 MB here the cache holds 100.0 %" in found["settings"]
    limit = r"(The link|Waiting for answers) limits: reading all of it takes about |not known: more requests"
    assert re.match(limit, found["limit"])
    assert found["use"] == "no block was read yet"
    (tmp_path / "other").mkdir()
    tight = ("--cache-dir", str(tmp_path / "other"), "-o", "cache_size=16MiB", "-o", "keep_free=0")
    assert re.search(r'cache_size="1GB"|larger disk', checks(*tight, url)["to set"]["found"])


def test_doctor_reads_parts_of_an_object_on_s3(s3):
    s3.put("k", noise(1000))
    fs = fsspec.filesystem("cachedfs", target_protocol="s3")
    read_at_once(fs.origin_fs, s3.path("k"), n=2, size=400, of=1000)
    asked = [each.headers["range"] for each in s3.server.requests if each.kind == "media"]
    assert sorted(asked) == ["bytes=0-399", "bytes=400-799"]
