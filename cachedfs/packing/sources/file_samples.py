"""Files as samples: their bytes unchanged, or the pixels of images."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cachedfs.packing.pack_types import Array, Field, SampleBatch
from cachedfs.packing.sources.sample_source import (
    MAX_SAMPLE,
    NAMES,
    PIECE,
    Counts,
    SampleSource,
    joined,
    spread,
)
from cachedfs.packing.sources.source_files import BadFile, SourceFiles

SAMPLED = 32  # files that `look` reads
IMAGES = 64  # image files that `look` decodes, to see if all have one shape
SAMPLED_SIZE = 256 << 10  # bytes of each file that are compressed to choose a codec
DECODED = 24 << 20  # approximate bytes of images that are decoded at a time
# Mean bytes of a file from which on files are prefetched. Smaller ones are requested by hundreds in one call anyway,
# and a plan for each of them takes a fifth more CPU time.
PREFETCHED = 64 << 10
NAME_FIELD = Field(NAMES, "uint8", is_ragged=True, means="utf-8", is_small=True)


class FileSource(SampleSource):
    """A source with one sample for each file: its bytes. Counting needs only the listing."""

    fields = (Field("data", "uint8", is_ragged=True, means="bytes"), NAME_FIELD)

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        if columns is not None:
            raise ValueError(f"columns={columns!r}: files have none; leave it out")
        super().__init__(files)
        self.total_size = files.size
        self.is_prefetched = files.size >= PREFETCHED * len(files)

    def look(self) -> list[SampleBatch]:
        sizes = self.files.sizes.tolist()
        some = [i for i in spread(len(sizes), SAMPLED) if sizes[i]]
        parts = self.files.ranges([(i, 0, min(SAMPLED_SIZE, sizes[i])) for i in some])
        [names] = self.known(range(min(len(sizes), SAMPLED))).batches
        # The sizes of all files.
        values = {"data": np.frombuffer(b"".join(parts), "u1"), **names.values}
        return [SampleBatch(values, {**names.sizes, "data": self.files.sizes})]

    def known(self, numbers: range) -> Counts:
        names, sizes = joined(map(self.files.name, numbers))
        of_data = self.files.sizes[numbers.start : numbers.stop]
        batch = SampleBatch({NAMES: names}, {"data": of_data, NAMES: sizes})
        return Counts({"data": int(of_data.sum())}, [batch])

    def batches(self, numbers: range) -> Iterator[SampleBatch]:
        sizes = self.files.sizes.tolist()
        for start in range(0, max(sizes[i] for i in numbers), PIECE):  # one step, except for a large file
            wanted = [(i, start, min(start + PIECE, sizes[i])) for i in numbers if sizes[i] > start]
            data = np.frombuffer(b"".join(self.files.ranges(wanted)), "u1")
            yield SampleBatch({"data": data}, {})


class ImageSource(SampleSource):
    """A source with one sample for each image file: its pixels.

    If the images differ in shape, `image` is ragged, and `image_shape` has the shape of each.
    """

    may_skip = True
    _n_decoded = 1  # images that are decoded at a time

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        """Create the source.

        `columns={"image": "ragged"}` makes `image` ragged even if all images that `look` decodes have one shape.
        """
        super().__init__(files)
        if columns not in (None, {"image": "ragged"}):
            raise ValueError(
                f"columns={columns!r}: of images {{'image': 'ragged'}} is possible, and nothing else"
            )
        self._is_ragged = columns is not None
        self._is_oriented = options.get("decode") != "image-raw"

    def look(self) -> list[SampleBatch]:
        numbers = self.files.numbers
        kinds: set[tuple[str, tuple[int, ...]]] = set()  # dtype and shape
        kept: dict[int, Array] = {}
        bad: dict[int, str] = {}
        n_images = n_bytes = n_kept = 0
        for number in (numbers[i] for i in spread(len(numbers), IMAGES)):  # one by one, to limit memory
            for image in self._images([number], bad).values():
                kinds.add((image.dtype.name, image.shape))
                n_images, n_bytes = n_images + 1, n_bytes + image.nbytes
                if len(kept) < 2 or n_kept < DECODED:
                    kept[number] = image
                    n_kept += image.nbytes
        if not n_images:
            number = min(bad)
            raise BadFile(self.files.url_of(number), bad[number])
        dtypes = sorted({dtype for dtype, _ in kinds})
        if len(dtypes) > 1:
            raise ValueError(
                f"{self.files.url}: images of several types ({', '.join(dtypes)}) cannot be one array"
            )
        if self._is_ragged or len(kinds) > 1:
            image_field = Field("image", dtypes[0], is_ragged=True, shapes="image_shape")
            self.fields = image_field, Field("image_shape", "int32", (3,), is_small=True), NAME_FIELD
        else:
            self.fields = Field("image", dtypes[0], kinds.pop()[1]), NAME_FIELD
        self._n_decoded = max(1, DECODED * n_images // max(1, n_bytes))
        return [self._batch_of(kept, {})]

    def batches(self, numbers: range) -> Iterator[SampleBatch]:
        there = [number for number in numbers if number not in self.files.removed]
        for at in range(0, len(there), self._n_decoded):
            bad: dict[int, str] = {}
            images = self._images(there[at : at + self._n_decoded], bad)
            for number in [i for i, image in images.items() if image.dtype.name != self.fields[0].dtype]:
                bad[number] = f"{self._unlike(images.pop(number))}: pack it apart"
            yield self._batch_of(images, bad)

    def _images(self, numbers: Sequence[int], bad: dict[int, str]) -> dict[int, Array]:
        """Return the images of some files by number; put the reasons for those that cannot be decoded into `bad`."""
        found: dict[int, Array] = {}
        datas = self.files.ranges([(i, 0, int(self.files.sizes[i])) for i in numbers], bad)
        for number, data in zip(numbers, datas, strict=True):
            try:
                found[number] = _decoded(data, self.files.url_of(number), is_oriented=self._is_oriented)
            except BadFile as error:
                bad.setdefault(number, error.reason)
        return found

    def _batch_of(self, by_number: Mapping[int, Array], bad: Mapping[int, str]) -> SampleBatch:
        images, field = list(by_number.values()), self.fields[0]
        for number, image in by_number.items():
            if not field.is_ragged and image.shape != field.shape:
                advice = 'columns={"image": "ragged"} packs images of any shape'
                raise ValueError(f"{self.files.url_of(number)}: {self._unlike(image)}: {advice}")
        values, sizes = {}, {}
        values[NAMES], sizes[NAMES] = joined(self.files.name(i) for i in by_number)
        if field.is_ragged:
            flat = [np.empty(0, field.dtype), *(image.reshape(-1) for image in images)]
            shapes = [image.shape if image.ndim == 3 else (*image.shape, 1) for image in images]
            values["image"] = np.concatenate(flat)
            values["image_shape"] = np.array(shapes, "int32").reshape(-1, 3)
            sizes["image"] = np.array([image.size for image in images], np.int64)
        else:
            values["image"] = np.array(images, field.dtype).reshape(-1, *field.shape)
        return SampleBatch(values, sizes, bad)

    def _unlike(self, image: Array) -> str:
        return f"an image of {image.dtype} {image.shape}, where the first ones looked at are {self.fields[0]}"


def _decoded(data: bytes, name: str, *, is_oriented: bool) -> Array:
    """Return the pixels of an image: (height, width), or (height, width, channels).

    `is_oriented`: turn the image as its EXIF orientation says, as viewers do. Raises BadFile for data that Pillow
    cannot decode and for images over `MAX_SAMPLE` bytes.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError("decode='image' needs Pillow: pip install pillow") from error
    try:
        with Image.open(io.BytesIO(data)) as image:
            if (n := getattr(image, "n_frames", 1)) > 1 and image.format != "MPO":  # photos with a preview
                raise BadFile(
                    name, f"it has {n} pages or frames: make a file of each, or pack the bytes of files"
                )
            if is_oriented:
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode in ("P", "PA"):  # palette indexes have no meaning alone
                image = image.convert("RGBA" if "transparency" in image.info or image.mode == "PA" else "RGB")
            elif image.mode in ("CMYK", "YCbCr", "LAB", "HSV", "1"):
                image = image.convert("L" if image.mode == "1" else "RGB")
            pixels = np.asarray(image)
    except UnidentifiedImageError as error:  # its text has the address of the buffer
        raise BadFile(name, "Pillow cannot decode the image: it is of no format that Pillow knows") from error
    except (BadFile, MemoryError):
        raise
    except Exception as error:  # Pillow's plugins raise errors of many types for data that they cannot decode
        raise BadFile(name, f"Pillow cannot decode the image: {error}") from error
    if pixels.nbytes > MAX_SAMPLE:
        raise BadFile(name, f"it has {pixels.nbytes:,} bytes decoded, more than {MAX_SAMPLE:,}")
    return pixels
