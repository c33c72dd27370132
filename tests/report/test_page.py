"""The report page: self-contained, with the numbers of the run."""

import html
import json
import re

import fsspec
import pytest

from cachedfs import log_events
from cachedfs.common import event_log
from cachedfs.filesystem import CachedGCSFileSystem
from tests.cli import helpers
from tests.support import MiB, forget, noise


@pytest.fixture
def run(cloud, tmp_path, monkeypatch):
    """A run with events: five objects read twice, and a missing one; yields the counts of the server and of `stats`."""
    monkeypatch.setenv(event_log.VARIABLE, "")
    for number in range(5):
        cloud.put(f"d{number % 2}/{number}", noise(2 * MiB + number))
    log_events(tmp_path / "events")
    fs = CachedGCSFileSystem(request_size=MiB)
    for number in [*range(5), *range(5)]:
        fs.cat_file(cloud.path(f"d{number % 2}/{number}"))
    with pytest.raises(FileNotFoundError):
        fs.cat_file(cloud.path("<b>none</b>"))
    engine = fs._objects.engine
    asked = len(cloud.server.requests)
    forget()
    log_events(None)
    return tmp_path / "events", engine.sums(), asked


def report(*arguments, status=0):
    return helpers.run("report", *map(str, arguments), status=status)


def test_the_page_is_self_contained_and_has_the_numbers_of_the_run(run, tmp_path):
    folder, sums, asked = run
    page = tmp_path / "report.html"
    said = report(folder, "-o", page).stdout.strip()
    text = page.read_text(encoding="utf-8")
    cells = re.findall(r"<td>([a-z ]+)</td><td>([\d,]+)<", text)
    numbers = {name.replace(" ", "_"): int(value.replace(",", "")) for name, value in cells}
    assert numbers["requests"] == asked == sums["requests"]
    for name in ("hits", "misses", "bytes_fetched", "bytes_served", "evictions"):
        assert numbers[name] == sums[name], name
    assert numbers["requests_failed"] == 1
    assert f'<p id="sentence">{html.escape(said)}</p>' in text
    assert text.count("<figure>") == 5
    assert not re.search(r"<script|<link|<img|@import|url\(|src=|href=", text)
    assert "<b>none</b>" not in text, "names are escaped"


def test_json_has_the_same_numbers_and_no_page(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The cache of the run is shown, not the configured one.
    monkeypatch.setitem(fsspec.config.conf, "cachedfs", {"cache_dir": str(tmp_path / "other")})
    folder, sums, asked = run
    found = json.loads(report(folder, "--json").stdout)
    assert found["n_requests"] == found["counts"]["requests"] == asked
    assert found["counts"]["hits"] == sums["hits"]
    assert sorted(found["cache"].values()) == pytest.approx([4 * MiB, 6 * MiB], rel=1e-3)  # with trailers
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "typed").mkdir()
    assert json.loads(report(folder, "--json", "--cache-dir", "typed").stdout)["cache"] == {}


def test_making_a_report_adds_no_events(run, cloud):
    folder, _, _ = run
    program = "import sys; from cachedfs.cli import main; main(sys.argv[1:])"
    code = f"import os; os.environ['CACHEDFS_EVENTS'] = {str(folder)!r}; {program}"
    assert json.loads(cloud.python(code, "report", "--json"))["n_processes"] == 1
    assert json.loads(report(folder, "--json").stdout)["n_processes"] == 1


def test_without_events_the_error_says_how_to_record_some(tmp_path, monkeypatch):
    monkeypatch.delenv(event_log.VARIABLE, raising=False)
    assert "CACHEDFS_EVENTS" in report(tmp_path, status=1).stderr
    assert "CACHEDFS_EVENTS" in report(status=2).stderr
