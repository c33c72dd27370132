"""What a notebook shows of a filesystem, of its statistics and of a prefetch."""

import fsspec
import pytest

from cachedfs.core.statistics import Stats
from tests.support import MiB, noise


def test_a_notebook_shows_filesystem_stats_and_prefetch(cloud, capsys):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    for number in range(3):
        cloud.put(f"d/{number}", noise(MiB))
    fs = fsspec.filesystem("cgs")
    fs.cat_file(cloud.path("d/0"))
    fs._objects.engine.drain(120)
    assert "CachedGCSFileSystem over gs://" in fs._repr_html_()
    for shown in (fs, fs.stats()):
        assert "1.05 MB in 1 request" in shown._repr_html_()
    plan = fs.prefetch(f"{cloud.path('d')}/")
    assert plan.show().bytes_total == 3 * MiB
    assert "3.15M/3.15M" in capsys.readouterr().err
    assert "Prefetch: done, " in plan._repr_html_()
    assert "3.15 MB of 3.15 MB" in plan._repr_html_()


def test_a_cache_that_cannot_store_is_shown():
    assert "the disk is &lt;full&gt;" in Stats(cannot_store="the disk is <full>")._repr_html_()


def test_an_error_of_a_prefetch_is_shown(cloud):
    plan = fsspec.filesystem("cgs").prefetch(cloud.path("<none>"))
    with pytest.raises(FileNotFoundError):
        plan.show()
    assert "&lt;none&gt;" in plan._repr_html_()
    assert "<none>" not in plan._repr_html_()
