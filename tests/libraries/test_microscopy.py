"""OME-Zarr: images of several resolutions, as lazy arrays, which napari shows."""

import numpy as np
import pytest
import zarr
from zarr.storage import FsspecStore

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries that it imports
PIXELS = np.arange(2 * 128 * 128, dtype="u2").reshape(2, 128, 128)


def test_ome_zarr_reads_an_image(place):
    pytest.importorskip("ome_zarr")
    from ome_zarr.io import parse_url
    from ome_zarr.reader import Reader
    from ome_zarr.writer import write_image

    url = place.url("image.zarr")
    write_image(PIXELS, zarr.open_group(url, mode="w"), axes="cyx", scale_factors=[2])
    for _ in place.twice():
        store = FsspecStore.from_url(url, read_only=True)
        image = next(Reader(parse_url(store))())
        assert np.array_equal(image.data[0], PIXELS)
