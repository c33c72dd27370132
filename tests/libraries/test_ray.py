"""Ray Data: tables and images through the filesystem, in Ray's own processes."""

import fsspec
import pytest

from tests.libraries.data import ROWS
from tests.libraries.test_samples import picture

# Ray starts several processes, and warns of its own options.
pytestmark = [
    pytest.mark.works,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.parametrize("place", ["cachedfs::gs://", "cdrive://"], indirect=True),
]
ray = pytest.importorskip("ray")


@pytest.fixture
def cluster():
    """Two processes with the configuration of the test."""
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_ray_reads_parquet(place, cluster):
    for i in range(2):
        ROWS[i * 500 : i * 500 + 500].to_parquet(place.url(f"set/{i}.parquet"))
    for _ in place.twice(fetches=2):
        fs, path = fsspec.url_to_fs(place.url("set"), **place.options)
        rows = ray.data.read_parquet(path, filesystem=fs)
        assert rows.sum("n") == ROWS["n"].sum()


def test_ray_reads_images(place, cluster):
    for i in range(6):
        place.put(f"images/{i}.png", picture(i))
    for _ in place.twice(fetches=6):
        fs, path = fsspec.url_to_fs(place.url("images"), **place.options)
        images = ray.data.read_images(path, filesystem=fs)
        assert sorted(each["image"][3, 3, 0] for each in images.take_all()) == list(range(6))
