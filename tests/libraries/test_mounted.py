"""Libraries that take local paths, over a mount: a second epoch in a new process asks the origin for nothing."""

import contextlib
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from tests.libraries.data import ROWS
from tests.libraries.test_samples import picture
from tests.support import HAS_FUSE

pytestmark = [
    pytest.mark.works,
    pytest.mark.skipif(not HAS_FUSE, reason="needs FUSE: apt-get install fuse3"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
    pytest.mark.parametrize("place", ["cachedfs::gs://", "cachedfs::drive://"], indirect=True),
]


@pytest.fixture
def mounted(place, tmp_path):
    """A function that mounts the place: its process ends with the block, as that of a user does."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def cachedfs(*arguments):
        subprocess.run([sys.executable, "-m", "cachedfs", *arguments], check=True, capture_output=True)

    @contextlib.contextmanager
    def mounted():
        # Immutable: ultralytics looks for files that it would like to write.
        options = ["--daemon", "-o", "max_age=immutable"]
        cachedfs("mount", *options, place.url().removeprefix("cachedfs::"), folder)
        try:
            yield folder
        finally:
            cachedfs("unmount", folder)

    return mounted


def test_delta_reads_a_table(place, mounted, tmp_path):
    DeltaTable, write_deltalake = (
        getattr(pytest.importorskip("deltalake"), name) for name in ("DeltaTable", "write_deltalake")
    )
    for half in range(2):
        write_deltalake(tmp_path / "table", pa.table(ROWS[half * 500 : half * 500 + 500]), mode="append")
    for path in (tmp_path / "table").rglob("*.*"):
        place.put(f"table/{path.relative_to(tmp_path / 'table')}", path.read_bytes())
    for _ in place.twice(fetches=4):
        with mounted() as folder:
            rows = DeltaTable(folder / "table").to_pyarrow_table()
            assert sorted(rows["n"].to_pylist()) == ROWS["n"].tolist()


def test_daft_reads_parquet(place, mounted):
    daft = pytest.importorskip("daft")
    ROWS.to_parquet(place.url("a.parquet"))
    for _ in place.twice(fetches=1):
        with mounted() as folder:
            rows = daft.read_parquet(f"{folder}/a.parquet")
            assert rows.sum("n").to_pydict() == {"n": [ROWS["n"].sum()]}


def test_datachain_reads_files(place, mounted, tmp_path_factory, monkeypatch):
    dc = pytest.importorskip("datachain")
    # It keeps a database in the working directory of its first use, for the whole process.
    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    for i in range(6):
        place.put(f"images/{i}.png", picture(i))
    for _ in place.twice(fetches=6):
        with mounted() as folder:
            files = dc.read_storage(f"file://{folder}/images", type="image", update=True)
            shades = [file.read().getpixel((3, 3))[0] for file in files.to_values("file")]
            assert sorted(shades) == list(range(6))


def test_monai_loads_images(place, mounted):
    transforms = pytest.importorskip("monai.transforms")
    for i in range(6):
        place.put(f"images/{i}.png", picture(i))
    for _ in place.twice(fetches=6):
        with mounted() as folder:
            load = transforms.LoadImage(image_only=True)
            shades = [int(load(path)[3, 3, 0]) for path in sorted(folder.glob("images/*.png"))]
            assert shades == list(range(6))


def test_ultralytics_loads_images_and_labels(place, mounted):
    data = pytest.importorskip("ultralytics.data.dataset")
    for i in range(6):
        place.put(f"images/{i}.png", picture(i, size=32))
        place.put(f"labels/{i}.txt", b"0 0.5 0.5 0.2 0.2\n")
    for _ in place.twice(fetches=12):
        with mounted() as folder:
            images = data.YOLODataset(img_path=f"{folder}/images", data={"names": {0: "shape"}}, imgsz=32)
            assert len(images) == 6
            assert {int(np.max(images.load_image(i)[0])) for i in range(6)} == set(range(6))


def test_tf_data_reads_paths(place, mounted):
    tf = pytest.importorskip("tensorflow")
    for i in range(6):
        place.put(f"n/{i}", b"%d" % i)
    for _ in place.twice(fetches=6):
        with mounted() as folder:
            rows = tf.data.Dataset.list_files(f"{folder}/n/*").map(tf.io.read_file)
            assert sorted(map(int, rows.as_numpy_iterator())) == list(range(6))
