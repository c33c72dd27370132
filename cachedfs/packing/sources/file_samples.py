"""Files as samples: their bytes unchanged, or the pixels of images."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    spread,
)

__all__ = ["FileSource", "ImageSource", "as_text", "decoded_image"]

PER_PIECE = 4096  # files in a piece
SAMPLED = 32  # files that `look` reads
IMAGES = 64  # image files that `look` decodes, to see if all have one shape
SAMPLED_SIZE = 256 << 10  # bytes of each file that are compressed to choose a codec
DECODED = 24 << 20  # approximate bytes of the decoded images of a piece
AXES = ("height", "width", "channels")


class FileSource(SampleSource):
    """A source with one sample for each file: its bytes. Counting needs only the listing."""

    kind = "files"
    is_known = True
    fields = (
        Field("data", "uint8", is_ragged=True, means="bytes"),
        Field(NAMES, "uint8", is_ragged=True, means="utf-8", is_small=True),
    )

    def __init__(self, files: SourceFiles, columns: Any = None, **options: Any) -> None:
        if columns is not None:
            raise ValueError(f"columns={columns!r}: files have none; leave it out")
        super().__init__(files)
        self.fields = FileSource.fields

    def look(self) -> list[SampleBatch]:
        chosen = spread(len(self.files), SAMPLED)
        wanted = [(i, 0, min(SAMPLED_SIZE, int(self.files.sizes[i]))) for i in chosen if self.files.sizes[i]]
        data = b"".join(self.files.ranges(wanted)) if wanted else b""
        # The sizes are those of all files.
        names = self.measure(SourcePiece(0, 0, min(PER_PIECE, len(self.files))))
        return [
            SampleBatch(
                len(self.files),
                {"data": np.frombuffer(data, "u1"), **names.small},
                {"data": self.files.sizes, NAMES: names.sizes[NAMES]},
            )
        ]

    def pieces(self) -> Iterable[SourcePiece]:
        n = len(self.files)
        return [SourcePiece(0, start, min(start + PER_PIECE, n)) for start in range(0, n, PER_PIECE)]

    def measure(self, piece: SourcePiece) -> PieceCounts:
        names, sizes = as_text(self.files.name(i) for i in range(piece.start, piece.stop))
        return PieceCounts(
            piece.stop - piece.start,
            {NAMES: names},
            {"data": self.files.sizes[piece.start : piece.stop], NAMES: sizes},
        )

    def rows(
        self, field: Field, span: FieldSpan, box: tuple[slice, ...], tally: Callable[[], PieceCounts]
    ) -> Array:
        return np.frombuffer(b"".join(self.files.ranges(list(self._within(*span)))), "u1")

    def _within(self, piece: SourcePiece, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the file ranges of the bytes from `start` to `stop` of a piece."""
        ends = np.cumsum(self.files.sizes[piece.start : piece.stop])
        at = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            size = int(self.files.sizes[piece.start + at])
            begin = int(ends[at]) - size
            if size:
                yield piece.start + at, start - begin, min(stop - begin, size)
            start, at = int(ends[at]), at + 1

    def items(self, piece: SourcePiece) -> Iterator[Item]:
        for i in range(piece.start, piece.stop):
            if self.files.sizes[i]:
                yield self.files.paths[i], 0, int(self.files.sizes[i])

    @property
    def total_size(self) -> int:
        return self.files.size

    def shown(self, piece: SourcePiece) -> str:
        return self.files.shown(piece.start)


class ImageSource(DecodedSource):
    """A source with one sample for each image file: its pixels.

    If the images differ in shape, `image` is ragged, and `image_shape` has the shape of each.
    """

    kind = "files"
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
        self._per_piece = PER_PIECE

    def look(self) -> list[SampleBatch]:
        numbers = self.files.numbers
        shapes: set[tuple[int, ...]] = set()
        dtypes: set[str] = set()
        kept: list[tuple[int, Array]] = []
        n_bytes = 0
        bad: dict[int, str] = {}
        n_images = 0
        for number in (numbers[i] for i in spread(len(numbers), IMAGES)):  # one by one, to limit memory
            image = self._images([number], bad).get(number)
            if image is None:
                continue
            n_images += 1
            shapes.add(image.shape)
            dtypes.add(image.dtype.name)
            n_bytes += image.nbytes
            if len(kept) < 2 or sum(each.nbytes for _, each in kept) < DECODED:
                kept.append((number, image))
        if not n_images:
            number = min(bad)
            raise BadFile(self.files.shown(number), bad[number])
        if len(dtypes) > 1:
            raise ValueError(
                f"{self.files.url}: images of several types ({', '.join(sorted(dtypes))}) cannot be one array"
            )
        is_ragged = self._is_ragged = self._is_ragged or len(shapes) > 1
        shape = () if is_ragged else shapes.pop()
        self.fields = (
            Field("image", dtypes.pop(), shape, is_ragged, shapes="image_shape" if is_ragged else ""),
            *([Field("image_shape", "int32", (3,), is_small=True)] if is_ragged else []),
            Field(NAMES, "uint8", is_ragged=True, means="utf-8", is_small=True),
        )
        self._per_piece = max(1, min(PER_PIECE, DECODED * n_images // max(1, n_bytes)))
        return [self._batch_of(dict(kept))]

    def piece_of(self, number: int) -> SourcePiece:
        return SourcePiece(0, number // self._per_piece * self._per_piece, END)

    def pieces(self) -> Iterable[SourcePiece]:
        n, step = len(self.files), self._per_piece
        return [SourcePiece(0, start, min(start + step, n)) for start in range(0, n, step)]

    def read(self, piece: SourcePiece) -> SampleBatch:
        numbers = set(range(piece.start, piece.stop))
        bad = dict.fromkeys(numbers & self.files.removed, "it was removed")
        images = self._images(sorted(numbers - bad.keys()), bad)
        return dataclasses.replace(self._batch_of(images), skipped=bad)

    def items(self, piece: SourcePiece) -> Iterator[Item]:
        for i in range(piece.start, piece.stop):
            if i not in self.files.removed:
                yield self.files.paths[i], 0, int(self.files.sizes[i])

    def _images(self, numbers: Sequence[int], bad: dict[int, str]) -> dict[int, Array]:
        """Return the images of some files by number; put the reasons for those that cannot be decoded into `bad`."""
        datas = self.files.ranges([(i, 0, int(self.files.sizes[i])) for i in numbers], bad)

        def decode(number: int, data: bytes) -> Array | None:
            try:
                return decoded_image(data, self.files.shown(number), is_oriented=self._is_oriented)
            except BadFile as error:
                bad.setdefault(number, error.reason)
                return None

        with ThreadPoolExecutor(2) as pool:  # Pillow releases the GIL while it decodes
            images = zip(numbers, pool.map(decode, numbers, datas), strict=True)
            return {number: image for number, image in images if image is not None}

    def _batch_of(self, by_number: Mapping[int, Array]) -> SampleBatch:
        field, images = self.fields[0], list(by_number.values())
        for number, image in by_number.items():
            if image.dtype.name != field.dtype or (not field.is_ragged and image.shape != field.shape):
                raise ValueError(
                    f"{self.files.shown(number)}: an image of {image.dtype} {image.shape}, where the first ones looked at are {field}: "
                    + (
                        'columns={"image": "ragged"} packs images of any shape'
                        if image.dtype.name == field.dtype
                        else "pack it apart"
                    )
                )
        names, name_sizes = as_text(map(self.files.name, by_number))
        values, sizes = {NAMES: names}, {NAMES: name_sizes}
        if field.is_ragged:
            whole = [image if image.ndim == 3 else image[..., None] for image in images]
            values["image"] = np.concatenate(
                [np.empty(0, field.dtype), *(image.reshape(-1) for image in whole)]
            )
            values["image_shape"] = np.array([image.shape for image in whole], "int32").reshape(-1, 3)
            sizes["image"] = np.array([image.size for image in whole], np.int64)
        else:
            values["image"] = np.array(images, field.dtype).reshape(-1, *field.shape)
        return SampleBatch(len(images), values, sizes)

    def shown(self, piece: SourcePiece) -> str:
        return self.files.shown(piece.start)


def decoded_image(data: bytes, name: str, *, is_oriented: bool = True) -> Array:
    """Return the pixels of an image: (height, width), or (height, width, channels).

    `is_oriented`: turn the image as its EXIF orientation says, as viewers do. Raises BadFile for data that Pillow cannot decode and for images over `MAX_SAMPLE` bytes.
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


def as_text(words: Iterable[str]) -> tuple[Array, Array]:
    """Return strings as one array of UTF-8 bytes, and the length of each."""
    encoded = [word.encode("utf-8", "surrogatepass") for word in words]
    return np.frombuffer(b"".join(encoded), "u1"), np.fromiter(map(len, encoded), np.int64, len(encoded))
