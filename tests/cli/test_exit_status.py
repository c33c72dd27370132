"""Errors, interrupts and closed pipes: one line, and an exit status."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cachedfs.cli import reading
from cachedfs.cli.app import app
from cachedfs.sim import Fault
from tests.cli.helpers import interrupted, run
from tests.support import MiB, noise


@pytest.mark.parametrize("command", ["ls", "cat", "pin", "verify"])
def test_where_one_of_several_urls_names_nothing_the_others_are_done(cloud, command):
    for name in ("a", "c"):
        cloud.put(name, b"of " + name.encode())
    urls = [cloud.url(name, "gs://") for name in ("a", "b", "c", "d*")]
    alone = [run(command, urls[at]).stdout for at in (0, 2)]
    result = run(command, *urls, status=1)
    assert result.stdout == "".join(alone) != ""
    told = result.stderr.splitlines()
    assert [urls[1] in told[0], urls[3] in told[1], len(told)] == [True, True, 2]
    if command != "cat":
        result = run(command, "--json", *urls, status=1)
        assert [each["url"] for each in json.loads(result.stdout)] == [urls[0], urls[2]]
        assert [json.loads(line)["error"]["url"] for line in result.stderr.splitlines()] == [urls[1], urls[3]]


def test_no_traceback_unless_debug(cloud):
    url = cloud.url("nothing", "gs://")
    assert len(run("cat", url, status=1).stderr.splitlines()) == 1
    told = CliRunner().invoke(app, ["cat", "--debug", url]).stderr
    assert "Traceback (most recent call last)" in told
    assert told.splitlines()[-1].startswith("cachedfs: ")


def test_what_nobody_expected_asks_for_a_report(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("boom")

    monkeypatch.setattr(reading, "entries_of", broken)
    result = run("ls", ".", status=1)
    assert result.stderr == (
        "cachedfs: unexpected RuntimeError: boom (run with --debug for the traceback; please report)\n"
    )


@pytest.mark.parametrize(("command", "kind"), [("doctor", "media"), ("pin", "list")])
def test_ctrl_c_while_the_cloud_does_not_answer(cloud, command, kind):
    cloud.put("d/a", noise(2 * MiB))
    cloud.server.fail(Fault(kind=kind, stall_s=3600, times=None))
    assert interrupted(lambda: cloud.server.count(kind=kind), command, cloud.url("d", "gs://")) == ""


def test_with_its_output_closed_a_command_does_its_work(cloud):
    cloud.put("key", b"data")
    command = f'"{sys.executable}" -m cachedfs cat {cloud.url("key", "gs://")} >&-'
    done = subprocess.run(
        command, shell=True, env=cloud._environment(), stderr=subprocess.PIPE, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "unexpected" not in done.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_packages_it_says_what_to_install(cloud, package):
    code = f"import sys; sys.modules[{package!r}] = None; from cachedfs.cli import main; main()"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=cloud._environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert done.stderr == 'The command line needs typer and rich: pip install "cachedfs[cli]"\n'


@pytest.mark.parametrize(("name", "text"), [("conf.json", '{"gs": '), ("a.ini", "token")])
def test_a_damaged_configuration_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    environ = {**os.environ, "FSSPEC_CONFIG_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "cachedfs", "ls", str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{tmp_path}/{name}: fsspec cannot read this configuration: correct or remove it (" in done.stderr
