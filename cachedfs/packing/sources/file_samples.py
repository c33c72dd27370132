"""Files as samples: their bytes unchanged, or the pixels of images."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from cachedfs.packing.pack_types import END, Array, Field, FieldSpan, PieceCounts, SampleBatch, SourcePiece
from cachedfs.packing.sources.sample_source import (
    MAX_SAMPLE,
    NAMES,
    BadFile,
    DecodedSource,
    Item,
    SampleSource,
    SourceFiles,
)
from cachedfs.packing.sources.source_tools import joined, spread, within

__all__ = ["FileSource", "ImageSource"]

PER_PIECE = 4096  # files in a piece
SAMPLED = 32  # files that `look` reads
IMAGES = 64  # image files that `look` decodes, to see if all have one shape
SAMPLED_SIZE = 256 << 10  # bytes of each file that are compressed to choose a codec
DECODED = 24 << 20  # approximate bytes of the decoded images of a piece
# Mean bytes of a file from which on files are prefetched. Smaller ones are requested by hundreds in one call anyway,
# and a plan for each of them takes a fifth more CPU time.
PREFETCHED = 64 << 10
NAME_FIELD = Field(NAMES, "uint8", is_ragged=True, means="utf-8", is_small=True)


class _OneSampleAFile(SampleSource):
    """Base class of sources with one sample for each file. A piece is a range of file numbers."""

    kind = "files"
    per_piece = PER_PIECE

    def piece_of(self, number: int) -> SourcePiece:
        return SourcePiece(0, number // self.per_piece * self.per_piece, END)

    def pieces(self) -> Iterable[SourcePiece]:
        n, step = len(self.files), self.per_piece
        return [SourcePiece(0, start, min(start + step, n)) for start in range(0, n, step)]

    def items(self, piece: SourcePiece) -> Iterator[Item]:
        for i in range(piece.start, piece.stop):
            if self.files.sizes[i]:  # 0 for those that were removed, too
                yield self.files.paths[i], 0, int(self.files.sizes[i])

    def shown(self, piece: SourcePiece) -> str:
        return self.files.shown(piece.start)


class FileSource(_OneSampleAFile):
    """A source with one sample for each file: its bytes. Counting needs only the listing."""

    is_known = True
    fields = (Field("data", "uint8", is_ragged=True, means="bytes"), NAME_FIELD)

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        if columns is not None:
            raise ValueError(f"columns={columns!r}: files have none; leave it out")
        super().__init__(files)

    def look(self) -> list[SampleBatch]:
        sizes = self.files.sizes
        wanted = [
            (i, 0, min(SAMPLED_SIZE, int(sizes[i]))) for i in spread(len(self.files), SAMPLED) if sizes[i]
        ]
        data = np.frombuffer(b"".join(self.files.ranges(wanted)), "u1")
        names = self.measure(SourcePiece(0, 0, min(PER_PIECE, len(self.files))))
        values = {"data": data, **names.small}
        # The sizes of all files.
        return [SampleBatch(len(self.files), values, {**names.sizes, "data": sizes})]

    def measure(self, piece: SourcePiece) -> PieceCounts:
        names, sizes = joined(self.files.name(i) for i in range(piece.start, piece.stop))
        found = {"data": self.files.sizes[piece.start : piece.stop], NAMES: sizes}
        return PieceCounts(piece.stop - piece.start, {NAMES: names}, found)

    def items(self, piece: SourcePiece) -> Iterator[Item]:
        if self.files.size >= PREFETCHED * len(self.files):
            yield from super().items(piece)

    def rows(self, field: Field, span: FieldSpan, box: tuple[slice, ...], counts: PieceCounts) -> Array:
        piece, start, stop = span
        parts = within(self.files.sizes[piece.start : piece.stop], start, stop)
        datas = self.files.ranges((piece.start + i, first, last) for i, first, last in parts)
        return np.frombuffer(b"".join(datas), "u1")

    @property
    def total_size(self) -> int:
        return self.files.size


class ImageSource(_OneSampleAFile, DecodedSource):
    """A source with one sample for each image file: its pixels.

    If the images differ in shape, `image` is ragged, and `image_shape` has the shape of each.
    """

    may_skip = True

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
            raise BadFile(self.files.shown(number), bad[number])
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
        self.per_piece = max(1, min(PER_PIECE, DECODED * n_images // max(1, n_bytes)))
        return [self._batch_of(kept)]

    def read(self, piece: SourcePiece) -> SampleBatch:
        numbers = set(range(piece.start, piece.stop))
        bad = dict.fromkeys(numbers & self.files.removed, "it was removed")
        images = self._images(sorted(numbers - bad.keys()), bad)
        return dataclasses.replace(self._batch_of(images), skipped=bad)

    def _images(self, numbers: Sequence[int], bad: dict[int, str]) -> dict[int, Array]:
        """Return the images of some files by number; put the reasons for those that cannot be decoded into `bad`."""
        datas = self.files.ranges([(i, 0, int(self.files.sizes[i])) for i in numbers], bad)

        def decode(number: int, data: bytes) -> Array | None:
            try:
                return _decoded(data, self.files.shown(number), is_oriented=self._is_oriented)
            except BadFile as error:
                bad.setdefault(number, error.reason)
                return None

        with ThreadPoolExecutor(2) as pool:  # Pillow releases the GIL while it decodes
            images = zip(numbers, pool.map(decode, numbers, datas), strict=True)
            return {number: image for number, image in images if image is not None}

    def _batch_of(self, by_number: Mapping[int, Array]) -> SampleBatch:
        images, field = list(by_number.values()), self.fields[0]
        for number, image in by_number.items():
            is_same_type = image.dtype.name == field.dtype
            if not is_same_type or (not field.is_ragged and image.shape != field.shape):
                advice = (
                    'columns={"image": "ragged"} packs images of any shape'
                    if is_same_type
                    else "pack it apart"
                )
                raise ValueError(
                    f"{self.files.shown(number)}: an image of {image.dtype} {image.shape}, where the first ones "
                    f"looked at are {field}: {advice}"
                )
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
        return SampleBatch(len(images), values, sizes)


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
            if is_oriented:
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode in ("P", "PA"):  # palette indexes have no meaning alone
                image = image.convert("RGBA" if "transparency" in image.info or image.mode == "PA" else "RGB")
            elif image.mode in ("CMYK", "YCbCr", "LAB", "HSV", "1"):
                image = image.convert("L" if image.mode == "1" else "RGB")
            pixels = np.asarray(image)
    except UnidentifiedImageError as error:  # its text has the address of the buffer
        raise BadFile(name, "Pillow cannot decode the image: it is of no format that Pillow knows") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadFile(name, f"Pillow cannot decode the image: {error}") from error
    if pixels.nbytes > MAX_SAMPLE:
        raise BadFile(name, f"it has {pixels.nbytes:,} bytes decoded, more than {MAX_SAMPLE:,}")
    return pixels
