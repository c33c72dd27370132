"""Notebook output: what a kernel shows of a filesystem, of its statistics and of a prefetch."""

import importlib.util
import json
import subprocess
import sys

import pytest

from cachedfs.common.types import Stats
from tests.support import MiB, noise

CELLS = [
    "import fsspec, os\nfs = fsspec.filesystem('cgs')\nfs.cat_file(os.environ['BUCKET'] + '/d/0')\nfs._objects.engine.drain(120)",
    "fs",
    "fs.stats()",
    "plan = fs.prefetch(os.environ['BUCKET'] + '/d/')\nplan.show().bytes_total",
    "plan",
]


def test_a_notebook_shows_filesystem_stats_and_prefetch(cloud, tmp_path):
    if not all(importlib.util.find_spec(name) for name in ("nbconvert", "ipykernel", "ipywidgets", "tqdm")):
        pytest.skip("needs nbconvert, ipykernel, ipywidgets and tqdm")
    for number in range(3):
        cloud.put(f"d/{number}", noise(MiB))
    new = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [{**new, "id": f"c{i}", "source": code} for i, code in enumerate(CELLS)]
    path = tmp_path / "book.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    environ = cloud._environment()
    environ.pop("PYTHONWARNINGS")
    convert = [sys.executable, "-m", "nbconvert", str(path), "--to", "notebook", "--execute", "--inplace"]
    done = subprocess.run(convert, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    outputs = [cell["outputs"] for cell in json.loads(path.read_text())["cells"]]
    filesystem, stats, plan = ("".join(outputs[i][0]["data"]["text/html"]) for i in (1, 2, 4))
    assert "CachedGCSFileSystem over gs://" in filesystem
    for text in (filesystem, stats):
        assert "1.05 MB in 1 request" in text
    assert "Prefetch: done, " in plan
    assert "3.15 MB of 3.15 MB" in plan
    # A running prefetch is a widget; what it returns comes last.
    assert [o for o in outputs[3] if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert outputs[3][-1]["data"]["text/plain"] == [str(3 * MiB)]
    assert "Traceback" not in str(outputs[3])
    assert "Warning" not in str(outputs[3])


def test_a_cache_that_cannot_store_is_shown():
    assert "the disk is &lt;full&gt;" in Stats(cannot_store="the disk is <full>")._repr_html_()


def test_an_error_of_a_prefetch_is_shown(cloud):
    import fsspec

    plan = fsspec.filesystem("cgs").prefetch(cloud.path("<none>"))
    with pytest.raises(FileNotFoundError):
        plan.show()
    text = plan._repr_html_()
    assert "&lt;none&gt;" in text
    assert "<none>" not in text
