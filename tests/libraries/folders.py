"""torchvision's image folder over URLs, as a user writes it; in a separate module that spawned processes import."""

import fsspec
from PIL import Image
from torchvision.datasets import ImageFolder


class Images(ImageFolder):
    """Lists by fsspec instead of the operating system."""

    def find_classes(self, directory):
        fs, path = fsspec.url_to_fs(directory)
        folders = [each["name"] for each in fs.ls(path) if each["type"] == "directory"]
        classes = sorted(name.rpartition("/")[2] for name in folders)
        return classes, {name: number for number, name in enumerate(classes)}

    @staticmethod
    def make_dataset(directory, class_to_idx, extensions=None, **options):
        fs, path = fsspec.url_to_fs(directory)
        return [
            (fs.unstrip_protocol(name), number)
            for each, number in class_to_idx.items()
            for name in sorted(fs.find(f"{path}/{each}"))
            if name.lower().endswith(extensions)
        ]


def image(url):
    with fsspec.open(url) as file:
        return Image.open(file).convert("RGB")
