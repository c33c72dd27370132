"""The commands `sim` and `demo`."""

import signal

import fsspec
import pytest

from tests.cli.helpers import json_of, run, start


def test_sim_runs_until_it_is_told_to_end(cloud, monkeypatch):
    process = start(cloud, "sim", "gcs", "--port", "0", "--seed", "1")
    address = process.stdout.readline().decode().strip()
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "endpoint_url": address})
    assert [entry["url"] for entry in json_of("ls", "gs://")] == ["gs://my-bucket"]
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0
    assert out == b""
    told = err.decode()
    assert f"export FSSPEC_GS_ENDPOINT_URL={address}\n" in told
    assert "cachedfs ls -l gs://\n" in told
    assert "Traceback" not in told


def test_sim_of_a_drive(cloud, tmp_path, monkeypatch):
    (tmp_path / "mine" / "data").mkdir(parents=True)
    (tmp_path / "mine" / "data" / "a.txt").write_text("hello")
    process = start(cloud, "sim", "drive", "--port", "0", "--folder", str(tmp_path / "mine"))
    process.stdout.readline()
    told = [process.stderr.readline().decode().split() for _ in range(3)]
    exported = dict(words[1].split("=", 1) for words in told[1:])
    options = {"token": exported["FSSPEC_DRIVE_TOKEN"], "endpoint_url": exported["FSSPEC_DRIVE_ENDPOINT_URL"]}
    monkeypatch.setitem(fsspec.config.conf, "drive", options)
    assert run("cat", "drive://My Drive/data/a.txt").stdout == "hello"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == 0


def test_sim_on_a_port_that_is_taken(cloud):
    port = cloud.server.endpoint_url.rpartition(":")[2]
    result = run("sim", "gcs", "--port", port, status=1)
    assert f"port {port}: Address already in use; --port 0 takes a free one" in result.stderr
    assert "export" not in result.stderr


@pytest.mark.parametrize(
    "line",
    [
        "sim nothing",
        "sim gcs --port 0 --profile zzz",
        "sim drive --port 0 --quota zzz",
        "sim gcs --folder /no/such/folder",
    ],
)
def test_a_cloud_that_cannot_be_is_not_announced(line):
    assert "export" not in run(*line.split(), status=2).output
