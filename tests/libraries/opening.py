"""Datasets as a user writes them; in a separate module that spawned processes import."""

import fsspec
from torch.utils.data import Dataset


class Numbers(Dataset):
    """Opens a file for each sample, in any process."""

    def __init__(self, urls):
        self.urls = urls

    def __len__(self):
        return len(self.urls)

    def __getitem__(self, i):
        with fsspec.open(self.urls[i]) as file:
            return int(file.read())


class Episodes(Dataset):
    """Frames of films at some seconds, each film opened by its URL in the process that decodes it."""

    def __init__(self, urls, seconds):
        self.places = [(url, at) for url in urls for at in seconds]

    def __len__(self):
        return len(self.places)

    def __getitem__(self, i):
        import av

        url, at = self.places[i]
        with fsspec.open(url) as file, av.open(file) as film:
            film.seek(int(at * av.time_base))
            frame = next(each for each in film.decode(video=0) if each.time >= at - 1e-3)
            return frame.to_ndarray(format="rgb24")
