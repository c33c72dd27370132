"""Examples: each runs on its own simulated cloud or on a URL, and its second pass sends no request."""

import collections
import importlib
import importlib.util
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
from unittest import mock

import fsspec
import pytest

from cachedfs.sim import DriveServer
from tests.support import HAS_FUSE, ROOT

pytestmark = pytest.mark.usefixtures("default_patience")  # examples run with the default settings

FOLDER = ROOT / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "simulated.py")
SPAWNING = {"dask_nodes.py", "ray_data.py"}  # their processes import the script again
LOGGED = re.compile(r".*\tINFO \w+\.py:\d+ -- .*\n")  # Ray logs what it runs
NEEDS = {
    "climatology.py": ["xarray", "zarr"],
    "dali_images.py": ["torch", "nvidia"],
    "dask_nodes.py": ["distributed"],
    "ddp.py": ["torch"],
    "hdf5_rows.py": ["torch", "h5py"],
    "kitti_to_zarr.py": ["torch", "zarr", "PIL"],
    "lmdb_file.py": ["lmdb"],
    "ray_data.py": ["ray", "pyarrow"],
    "summarise_files.py": ["torch"],
    "summarise_lines.py": ["torch"],
}
READS = {  # the content of the bucket or folder, and the arguments
    "hdf5_rows.py": ("digits_hdf5", "gs://{}/digits.h5"),
    "kitti_to_zarr.py": ("street_images", "drive://My Drive/{}/kitti", "drive://My Drive/{}/kitti.zarr"),
    "lmdb_file.py": ("digits_lmdb", "gs://{}/digits.lmdb"),
    "small_files.py": ("images", "drive://My Drive/{}/images"),
    "summarise_files.py": ("articles", "drive://My Drive/{}/pubmed"),
    "summarise_lines.py": ("article_lines", "drive://My Drive/{}/*.jsonl"),
}
PROOFS = {  # lines that an example prints: its second pass sends nothing, and what it read is right
    "climatology.py": [r"look 1: .* s, 0 requests", *(rf"month {n:2}: {n}\.00 on average" for n in range(1, 13))],
    "dali_images.py": [r"epoch 1: 48 different images in .* s, 0 requests", r".* \(3, 128, 416\), decoded on the CPU"],
    "dask_nodes.py": [r"epoch 1: 20,000 lines of 200 files in .* s, 0 requests"],
    "ddp.py": [r"epoch 1: .* of each rank \[\(200, 0\), \(200, 0\)\]"],
    "hdf5_rows.py": [r"epoch 2: 2,000 samples in .* s, 0 requests, 100% right", r"  hit ratio  1\.00 of at most 1\.00 .*"],
    "kitti_to_zarr.py": [r"epoch 1: 48 different images in .* s, 0 requests", r"the last batch: \(16, 3, 123, 408\); .*: 12.* 12.* 12.*"],
    "lmdb_file.py": [r"session 1: 2,000 records, 1,570,000 bytes in .* s, 0 requests"],
    "ray_data.py": [r"session 1, node 0: 6 files, 0 requests", r"session 1: 6,000 rows in .* s"],
    "small_files.py": [r"epoch 1: 2,000,000 bytes in .* s, 0 requests"],
    "summarise_files.py": [r"epoch 1: 200 different articles in .* s, 0 requests", r".* as a summary: ROUGE-1 recall 0\.699"],
    "summarise_lines.py": [r"epoch 1: 500 and 500 articles by 2 workers, 1,000 different, in .* s"],
}  # fmt: skip


def is_proven(name, printed):
    """Return whether an example prints all lines that prove it."""
    lines = printed.splitlines()
    return all(any(re.fullmatch(proof, line) for line in lines) for proof in PROOFS[name])


@pytest.fixture(autouse=True)
def one_thread_of_torch():
    """On a busy machine, two threads that wait for each other take many times as long."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    torch = importlib.import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(monkeypatch, capfd):
    """Run an example and return its output; in this process if possible, where torch is already imported."""
    monkeypatch.syspath_prepend(FOLDER)
    for section in "gs", "drive":  # set by an example without a URL
        monkeypatch.setitem(fsspec.config.conf, section, dict(fsspec.config.conf.get(section, {})))

    def run(name, *arguments):
        for needed in NEEDS.get(name, ()):
            pytest.importorskip(needed, reason=f"{needed} is not installed")
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capfd.readouterr()
        own = {"FSSPEC_CACHEDFS_KEEP_FREE": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        own["DASK_LOGGING__DISTRIBUTED"] = "critical"  # workers may miss the scheduler while a cluster ends
        with mock.patch.dict(os.environ, own):
            if name in SPAWNING:
                command = [sys.executable, FOLDER / name, *arguments]
                subprocess.run(command, check=True, timeout=600)
            else:
                runpy.run_path(str(FOLDER / name), run_name="__main__")
        out, err = capfd.readouterr()
        assert not LOGGED.sub("", err)
        return out

    return run


def test_every_example_is_listed_and_short():
    assert sorted(PROOFS) == EXAMPLES
    assert all(len((FOLDER / name).read_text().splitlines()) < 80 for name in EXAMPLES)


def marked(name):
    """Return the parameter of an example; a cluster of Ray takes a minute."""
    return pytest.param(name, marks=[pytest.mark.works] if name == "ray_data.py" else [])


@pytest.mark.parametrize("name", [marked(name) for name in EXAMPLES if name not in READS])
def test_an_example_runs_on_its_own_cloud_and_its_second_pass_sends_nothing(name, run):
    printed = run(name)
    assert is_proven(name, printed), printed


@pytest.mark.parametrize("name", sorted(READS))
def test_an_example_accepts_a_url_and_fetches_each_byte_once(name, run, cloud, drive, tmp_path):
    make, *arguments = READS[name]
    machine = drive if arguments[0].startswith("drive") else cloud
    sizes = collections.Counter(put(machine, make, tmp_path))
    arguments = [argument.format(machine.name) for argument in arguments]
    printed = run(name, *arguments)
    assert is_proven(name, printed), printed
    fetched = collections.Counter()
    for request in machine.server.requests:
        if request.kind == "media":
            fetched[request.key] += request.bytes_sent
    if name != "summarise_lines.py":  # its workers start together, in one small file
        assert not sizes - collections.Counter(fetched.values())


def put(machine, make, folder):
    """Put the data of an example's own cloud into this one; return the sizes of all files."""
    getattr(importlib.import_module("simulated"), make)(folder / "made")
    root = folder / "made/demo" if (folder / "made/demo").is_dir() else folder / "made"
    for path in filter(pathlib.Path.is_file, root.rglob("*")):
        yield len(machine.put(str(path.relative_to(root)), path.read_bytes()))


# The notebooks.

NOTEBOOK, MOUNT = FOLDER / "colab.ipynb", FOLDER / "mount.ipynb"
EPOCHS = r"epoch 0: .* s, (\d+) requests, .*\nepoch 1: .* s, 0 requests, .*\nepoch 2: .* s, 0 requests, 100% right\n"
needs_fuse = pytest.mark.skipif(not HAS_FUSE, reason="needs FUSE: apt-get install fuse3")


class QuickDrive(DriveServer):
    """The simulated Drive of a notebook, which answers at once."""

    def __init__(self, profile, **given):
        super().__init__("off", **given)


@pytest.fixture
def run_cells(monkeypatch, tmp_path, capfd):
    """Run the code of a notebook in this process; return what each cell printed, the images read by then, and the requests."""
    for needed in ("torch", "PIL", "IPython", "matplotlib"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    shells = importlib.import_module("IPython.core.interactiveshell")
    traitlets = importlib.import_module("traitlets.config")
    monkeypatch.setattr("cachedfs.sim.DriveServer", QuickDrive)
    monkeypatch.chdir(tmp_path)
    for section in "drive", "cachedfs":
        monkeypatch.setitem(fsspec.config.conf, section, {})
    servers = []
    monkeypatch.setattr(QuickDrive, "start", lambda self: servers.append(self) or DriveServer.start(self))

    def run_cells(notebook):
        book, cells = json.loads(notebook.read_text()), []
        assert not any(cell.get("outputs") for cell in book["cells"])
        shell = shells.InteractiveShell(config=traitlets.Config(HistoryAccessor={"enabled": False}))
        for cell in book["cells"]:
            if cell["cell_type"] == "code":
                shell.run_cell("".join(cell["source"])).raise_error()
                out, err = capfd.readouterr()
                assert not err
                asked = [request for server in servers for request in server.requests]
                images = {request.key for request in asked if request.kind == "media"}
                cells.append((out.replace("\r", ""), len(images), len(asked)))
        importlib.import_module("matplotlib.pyplot").close("all")
        return cells

    own = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    own |= {"MPLBACKEND": "agg", "FSSPEC_CACHEDFS_KEEP_FREE": "0"}
    with mock.patch.dict(os.environ, own):
        yield run_cells
    for server in servers:
        server.close()


def test_the_notebook_runs_without_an_account(run_cells):
    *_, (listed, *_), (trained, n_images, _), _, first, last = run_cells(NOTEBOOK)
    assert listed.startswith("400 images of ['blue', 'green', 'red']\n")
    assert re.fullmatch(EPOCHS, trained), trained
    assert n_images == 400
    assert all("25 batches, 400 samples" in report[0] for report in (first, last))


@needs_fuse
def test_the_notebook_of_a_mount_trains_from_paths_and_asks_once_for_each_image(run_cells, tmp_path):
    mounted = tmp_path / "mounted"
    try:
        *_, (shown, *_), (first, n_images, asked), (second, _, asked_by_then), (end, *_) = run_cells(MOUNT)
        assert not os.path.ismount(mounted)
    finally:
        if os.path.ismount(mounted):
            subprocess.run(["fusermount3", "-u", "-z", mounted], check=True)
    assert re.fullmatch(r"mounted at mounted; log: .*\nblue +green +red\n", shown)
    assert re.fullmatch(r"200 images of \['blue', 'green', 'red'\]\n.* s, \d+% right\n", first)
    assert re.fullmatch(r".* s, (9\d|100)% right\n", second)
    assert (n_images, asked_by_then, end) == (200, asked, "unmounted mounted\n")
