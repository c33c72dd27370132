"""The command `serve`."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from cachedfs.cli import serve
from tests.cli.helpers import run, start
from tests.server.served import boto3_client


def read(environment, bucket, key):
    names = "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
    client = boto3_client(*(environment[name] for name in names))
    return client.get_object(Bucket=bucket, Key=key)["Body"].read()


def test_it_serves_with_given_keys_until_it_is_told_to_end(cloud, monkeypatch):
    cloud.put("top/a", b"hello")
    monkeypatch.setenv("CACHEDFS_SERVE_ACCESS_KEY", "mine")
    monkeypatch.setenv("CACHEDFS_SERVE_SECRET_KEY", "secret")
    process = start(cloud, "serve", "--port=0", "--metrics-port=0", f"data=gs://{cloud.bucket}/top")
    lines = [process.stdout.readline().decode() for _ in range(15)]
    assert lines[0].startswith("serving data at http://127.0.0.1:")
    environment = dict(
        line.removeprefix("export ").strip().split("=", 1) for line in lines if "export" in line
    )
    assert (environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]) == ("mine", "secret")
    assert read(environment, "data", "a") == b"hello"
    url = lines[1].removeprefix("metrics at ").strip()
    with urllib.request.urlopen(url) as answer:
        assert f'cachedfs_blocks{{directory="{cloud.cache_dir}/'.encode() in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(urllib.request.Request(url, headers={"Host": "a.page.example"}))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (0, b"", b"")
    assert 'pl.scan_parquet("s3://data/a.parquet")' in "".join(lines)


def test_in_the_background(cloud, tmp_path):
    cloud.put("top/a", b"hello")
    log = tmp_path / "log"
    arguments = ["--daemon", "--port", "0", "--json", "--log", str(log), f"data=gs://{cloud.bucket}/top"]
    environment = cloud._environment() | {"PYTHONWARNINGS": ""}  # the process is left running
    command = [sys.executable, "-m", "cachedfs", "serve", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=600, check=True)
    assert done.stderr == b""
    told = json.loads(done.stdout)
    try:
        assert read(told["environment"], "data", "a") == b"hello"
        assert log.read_text() == "ready\n"
        with open(f"/proc/{told['pid']}/cmdline") as file:
            assert told["environment"]["AWS_SECRET_ACCESS_KEY"] not in file.read()
    finally:
        os.kill(told["pid"], signal.SIGTERM)


def test_the_process_in_the_background_gets_what_was_typed(cloud, tmp_path, monkeypatch):
    cloud.put("a", b"hello")
    started = []
    monkeypatch.setattr(
        serve, "start", lambda line, shown, **how: started.append((line, shown)) or (1, "log")
    )
    url = f"gs://{cloud.bucket}"
    before = ["--cache-dir", str(tmp_path), "-o", "max_age=5"]
    run(*before, "serve", "--daemon", "-o", "token=anon", "--port", "0", "--anonymous", "--", f"data={url}")
    [(line, shown)] = started
    port = line[-3]
    assert re.fullmatch(r"--port=\d{4,5}", port)
    typed = ["-o", "token=anon", "--port", "0", "--anonymous", "--is-background", port, "--", f"data={url}"]
    assert line == [*before, "serve", *typed]
    assert shown == ["serve", f"data={url}"]


def test_mistakes(cloud):
    assert "has no name: write data=gs://b" in run("serve", "gs://b", status=2).stderr
    assert "does not exist" in run("serve", f"data=gs://{cloud.bucket}/none", status=1).stderr
    cloud.put("a", b"1")
    assert "is a file, not a folder" in run("serve", f"data=gs://{cloud.bucket}/a", status=1).stderr
    assert "is no name of a bucket" in run("serve", f"D=gs://{cloud.bucket}", status=1).stderr
