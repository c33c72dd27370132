"""The report page: self-contained, with the numbers of the run, as a browser shows it."""

import json
import re

import fsspec
import pytest
from typer.testing import CliRunner

from cachedfs import log_events
from cachedfs.cli.app import app
from cachedfs.common import event_log
from cachedfs.filesystem import CachedGCSFileSystem
from tests.report.browser import CHROMIUM, browser
from tests.support import MiB, forget, noise

LOOK = """(() => {
  const seen = e => { const r = e.getBoundingClientRect(); return r.width > 0 && r.height > 0 };
  return {
    numbers: Object.fromEntries([...document.querySelectorAll('td[id^=n-]')].map(e => [e.id.slice(2), e.textContent])),
    sentence: document.getElementById('sentence').textContent,
    charts: [...document.querySelectorAll('pre')].map(e => ({
      seen: seen(e), width: e.getBoundingClientRect().width, letters: parseFloat(getComputedStyle(e).fontSize),
      whole: e.scrollWidth <= e.clientWidth, text: e.textContent,
    })),
    wide: document.documentElement.scrollWidth, window: window.innerWidth,
    loaded: performance.getEntriesByType('resource').length,
  }})()"""


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
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_a_browser_shows_the_numbers_of_the_run(run, tmp_path):
    folder, sums, asked = run
    page = tmp_path / "report.html"
    result = report(folder, "-o", page)
    with browser() as window:
        seen = window.look(page.as_uri(), LOOK)
        phone = window.look(page.as_uri(), LOOK, width=360)
    numbers = {name: int(text.replace(",", "")) for name, text in seen["numbers"].items()}
    assert numbers["requests"] == asked == sums["requests"]
    for name in ("hits", "misses", "bytes_fetched", "bytes_served", "evictions"):
        assert numbers[name] == sums[name], name
    assert numbers["requests_failed"] == 1
    assert seen["sentence"] in result.stdout
    assert len(seen["charts"]) == 5
    for chart in [*seen["charts"], *phone["charts"]]:
        assert chart["seen"]
        assert chart["whole"]
        assert chart["letters"] >= 8
    assert "receiving: at most" in seen["charts"][0]["text"]
    assert "█" in seen["charts"][0]["text"]
    assert seen["loaded"] == 0
    assert phone["wide"] <= phone["window"] == 360


def test_the_page_is_self_contained_and_escapes_names(run, tmp_path):
    page = tmp_path / "report.html"
    report(run[0], "-o", page)
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|<img|@import|url\((?!#)", text)
    assert set(re.findall(r'(?:src|href)="([^"#][^"]*)"', text)) == set()
    assert "<b>none</b>" not in text


def test_json_has_the_same_numbers_and_no_page(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, sums, asked = run
    found = json.loads(report(folder, "--json").stdout)
    assert found["n_requests"] == found["counts"]["requests"] == asked
    assert found["counts"]["hits"] == sums["hits"]
    assert sorted(found["cache"].values()) == pytest.approx([4 * MiB, 6 * MiB], rel=1e-3)  # with trailers
    assert not (tmp_path / "report.html").exists()


def test_the_cache_of_the_run_is_shown_and_not_the_configured_one(run, tmp_path, monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "cachedfs", {"cache_dir": str(tmp_path / "other")})
    found = json.loads(report(run[0], "--json").stdout)
    assert sorted(found["cache"].values()) == pytest.approx([4 * MiB, 6 * MiB], rel=1e-3)
    (tmp_path / "typed").mkdir()
    assert json.loads(report(run[0], "--json", "--cache-dir", tmp_path / "typed").stdout)["cache"] == {}


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
