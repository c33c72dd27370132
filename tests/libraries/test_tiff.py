"""async-tiff: tiles of a TIFF file."""

import asyncio
import io

import numpy as np
import pytest

from cachedfs.obspec import CachedStore


def test_async_tiff_reads_tiles(place):
    TIFF = pytest.importorskip("async_tiff").TIFF
    pixels, buffer = np.arange(64 * 64 * 3, dtype="u2").reshape(64, 64, 3), io.BytesIO()
    pytest.importorskip("tifffile").imwrite(buffer, pixels, tile=(32, 32), photometric="rgb")
    place.put("a.tif", buffer.getvalue())

    async def tile(store):
        tiff = await TIFF.open("a.tif", store=store)
        fetched = await tiff.fetch_tile(1, 0, 0)
        return np.asarray(await fetched.decode())

    for _ in place.twice(fetches=1):
        store = CachedStore(place.url())
        np.testing.assert_array_equal(asyncio.run(tile(store)), pixels[:32, 32:])
