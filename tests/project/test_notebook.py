"""Notebook output: a kernel runs a notebook, which is rendered and opened in a browser."""

import ast
import importlib.util
import json
import subprocess
import sys

import pytest

from cachedfs.common.text import shown
from cachedfs.common.types import Stats
from tests.report.browser import CHROMIUM, browser
from tests.support import MiB, noise

CELLS = [
    "import fsspec, os\nfs = fsspec.filesystem('cgs')\nfs.cat_file(os.environ['BUCKET'] + '/d/0')\nfs._objects.engine.drain(120)",
    "fs",
    "fs.stats()",
    "plan = fs.prefetch(os.environ['BUCKET'] + '/d/')\nplan.show().bytes_total",
    "plan",
    "print(tuple(fs.stats()))",
]
LOOK = """[...document.querySelectorAll('.jp-RenderedHTMLCommon')].map(e => ({
  title: e.querySelector('p b')?.textContent, high: e.getBoundingClientRect().height,
  rows: Object.fromEntries([...e.querySelectorAll('tr')].map(r => [...r.children].map(c => c.textContent))),
  bar: e.querySelector('progress') && e.querySelector('progress').position,
})).filter(e => e.title)"""


@pytest.fixture
def notebook(cloud, tmp_path):
    """A notebook after its run: its file, and its cells with their outputs."""
    if not all(importlib.util.find_spec(name) for name in ("nbconvert", "ipykernel", "ipywidgets", "tqdm")):
        pytest.skip("needs nbconvert, ipykernel, ipywidgets and tqdm")
    for number in range(3):
        cloud.put(f"d/{number}", noise(MiB))
    cells = [
        {
            "cell_type": "code",
            "id": f"c{i}",
            "source": code,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for i, code in enumerate(CELLS)
    ]
    path = tmp_path / "book.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    environ = cloud._environment()
    environ.pop("PYTHONWARNINGS")
    convert = [sys.executable, "-m", "nbconvert", str(path), "--to"]
    for to in [["notebook", "--execute", "--inplace"]] + [["html"]] * (CHROMIUM is not None):
        done = subprocess.run([*convert, *to], env=environ, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    return path, json.loads(path.read_text())["cells"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser")
def test_a_notebook_shows_filesystem_stats_and_prefetch(notebook, cloud):
    path, cells = notebook
    with browser() as window:
        filesystem, stats, plan = window.look(path.with_suffix(".html").as_uri(), LOOK)
    assert filesystem["title"] == "CachedGCSFileSystem over gs://"
    assert filesystem["rows"] == stats["rows"]
    assert stats["rows"]["fetched"] == "1.05 MB in 1 request"
    assert stats["rows"]["hits"] == "0 of 1 block, 0.0 %"
    assert plan["title"].startswith("Prefetch: done, ")
    assert (plan["rows"]["objects"], plan["rows"]["here"]) == ("3 of 3", "3.15 MB of 3.15 MB")
    assert plan["bar"] == 1
    assert all(each["high"] > 20 for each in (filesystem, stats, plan))
    # Python prints this for a tuple.
    counted = Stats(*ast.literal_eval("".join(cells[5]["outputs"][0]["text"])))
    assert counted.requests == len(cloud.server.requests)


def test_a_prefetch_is_a_widget_with_its_bytes(notebook):
    _, cells = notebook
    outputs = cells[3]["outputs"]
    assert [o for o in outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert outputs[-1]["data"]["text/plain"] == [str(3 * MiB)]
    assert "Traceback" not in str(outputs)
    assert "Warning" not in str(outputs)


def test_names_are_escaped():
    text = shown("<i>", "a & b", [("<b>", "<script>"), ("empty", "")])
    assert "<i>" not in text
    assert "<script>" not in text
    assert "a &amp; b" in text
    assert "empty" not in text


def test_a_cache_that_cannot_store_is_shown():
    assert "the disk is full" in Stats(cannot_store="the disk is full")._repr_html_()


def test_an_error_of_a_prefetch_is_shown(cloud):
    import fsspec

    plan = fsspec.filesystem("cgs").prefetch(cloud.path("<none>"))
    with pytest.raises(FileNotFoundError):
        plan.show()
    text = plan._repr_html_()
    assert "&lt;none&gt;" in text
    assert "<none>" not in text
