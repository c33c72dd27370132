"""Video: clips at random times by PyAV, and frames of episodes, as datasets in the form of LeRobot have them."""

import io
import random

import fsspec
import numpy as np
import pytest

from tests.libraries.data import forking

av = pytest.importorskip("av")

RATE, N_FRAMES = 25, 100


def video():
    """Return a film whose frames become brighter: frame i has the shade 2 i."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as film:
        stream = film.add_stream("mpeg4", rate=RATE, options={"g": "10"})
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for i in range(N_FRAMES):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), 2 * i, "u1"), format="rgb24")
            film.mux(stream.encode(frame))
        film.mux(stream.encode())
    return buffer.getvalue()


def starts():
    """Return the first frames of 100 clips of four frames."""
    return [random.Random(i).randrange(N_FRAMES - 4) for i in range(100)]


def shade(frame):
    return round(float(np.asarray(frame, "f4").mean()) / 2)


def test_clips_by_pyav(place):
    url = place.url("film.mp4")
    place.put("film.mp4", video())
    for _ in place.twice(fetches=1):
        with fsspec.open(url) as file, av.open(file) as film:
            stream = film.streams.video[0]
            for start in starts():
                at = int(start / RATE / stream.time_base)
                film.seek(at, stream=stream)
                frame = next(each for each in film.decode(stream) if each.pts >= at)
                assert abs(shade(frame.to_ndarray(format="rgb24")) - start) <= 3  # of 100


@forking
def test_frames_of_episodes_by_workers(place):
    DataLoader = pytest.importorskip("torch.utils.data").DataLoader
    from tests.libraries.opening import Episodes

    urls = [place.url(f"videos/{i}.mp4") for i in range(2)]
    for i in range(2):
        place.put(f"videos/{i}.mp4", video())
    for _ in place.twice(fetches=2):
        frames = Episodes(urls, seconds=[0.0, 1.0, 2.0, 3.0])
        shades = [
            shade(frame) for batch in DataLoader(frames, batch_size=4, num_workers=2) for frame in batch
        ]
        assert np.abs(np.array(shades) - [0, 25, 50, 75] * 2).max() <= 3
