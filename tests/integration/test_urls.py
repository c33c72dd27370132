"""URL forms and the methods of fsspec. Other libraries are in tests/libraries."""

import fsspec
import pytest
from fsspec.callbacks import Callback
from fsspec.generic import rsync

from tests.support import KiB, MiB, files_below, noise


@pytest.mark.parametrize(
    ("prefix", "name"), [("cachedfs::gs://", "gs"), ("cgs://", "gcs"), ("cgs://", "target_options")]
)
def test_options_reach_cachedfs_and_the_target(cloud, tmp_path, prefix, name):
    ours = {"cache_dir": str(tmp_path / "elsewhere"), "block_size": 64 * KiB}
    theirs = {"token": "anon", "endpoint_url": cloud.server.endpoint_url, "consistency": "size"}
    options = ours if prefix == "cgs://" else {"cachedfs": ours}
    data = cloud.put("a.bin", noise(200 * KiB))
    with fsspec.open(cloud.url("a.bin", prefix), **options, **{name: theirs}) as file:
        assert file.read() == data
        assert file.blocksize == 64 * KiB
        assert file.fs.target_options == theirs
        assert file.fs.stats().cache_dir.startswith(ours["cache_dir"])


@pytest.mark.parametrize("prefix", ["cgs://", "cachedfs::gs://"])
def test_rsync_takes_our_urls(cloud, tmp_path, prefix):
    options = {} if prefix == "cgs://" else {"inst_kwargs": {"default_method": "options"}}
    for name in ("a", "d/b"):
        cloud.put(f"from/{name}", name.encode())
    cloud.put("to/old", b"")
    source, target, local = cloud.url("from", prefix), cloud.url("to", prefix), f"file://{tmp_path}/to"
    for start, end in ((source, target), (source, local), (local, cloud.url("back", prefix))):
        copied = rsync(start, end, delete_missing=True, **options)
        assert copied == {f"{start}/{name}": f"{end}/{name}" for name in ("a", "d/b")}
        assert rsync(start, end, **options) == {}
    fs = fsspec.filesystem("cgs")
    for top in ("to", "back"):
        assert fs.cat(fs.find(cloud.path(top))) == {
            cloud.path(f"{top}/{n}"): n.encode() for n in ("a", "d/b")
        }


class Counting(Callback):
    """Records sizes and steps of each transfer by its target."""

    def __init__(self, **options):
        super().__init__(**options)
        self.branches = {}

    def branched(self, path_1, path_2, **kwargs):
        return self.branches.setdefault(path_2, Counting())


@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # raised by gcsfs in aiohttp
def test_get_and_put_report_sizes_to_their_callbacks(cloud, fs, tmp_path):
    data = {name: noise(size, size) for name, size in (("small", 1), ("big", 3 * MiB))}
    local, back = tmp_path / "local", tmp_path / "of" / "its own"
    local.mkdir()
    for name, content in data.items():
        (local / name).write_bytes(content)
    put, got = Counting(), Counting()
    fs.put(f"{local}/", cloud.url("up/"), recursive=True, callback=put)
    assert put.size == put.value in (2, 3)  # fsspec may count the folder
    fs.get(cloud.url("up"), str(back), recursive=True, callback=got)
    assert files_below(back) == data
    for name, content in data.items():
        branch = got.branches[str(back / name)]
        assert branch.size == branch.value == len(content)
    one = Counting()
    fs.put_file(back / "big", cloud.path("up/one"), callback=one)
    assert one.size == one.value == 3 * MiB
    with pytest.raises(FileNotFoundError):
        fs.get_file(cloud.path("up/none"), tmp_path / "nothing" / "none")
    assert not (tmp_path / "nothing").exists()


def test_find_with_a_prefix_finds_what_begins_with_it_in_the_folder_at_each_depth(base):
    fs, root = fsspec.url_to_fs(base)
    for name in ("pre_1/a", "pre_2/b", "pre_c", "other/pre_d"):
        fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{root}/{name}", b"1")

    def found(**options):
        return [path.removeprefix(f"{root}/") for path in fs.find(root, **options)]

    assert found(prefix="pre_") == ["pre_1/a", "pre_2/b", "pre_c"]
    assert found(prefix="pre_", maxdepth=1) == ["pre_c"]
    assert found(prefix="pre_", withdirs=True) == ["pre_1", "pre_1/a", "pre_2", "pre_2/b", "pre_c"]
    assert found(prefix="pre_", withdirs=True, maxdepth=1) == ["pre_1", "pre_2", "pre_c"]
    assert found(prefix=None) == found(prefix="") == ["other/pre_d", "pre_1/a", "pre_2/b", "pre_c"]
    assert found(prefix=None, maxdepth=1) == ["pre_c"]
    assert fs.find(f"{root}/pre_c", prefix="pre_") == []
    assert fs.find(f"{root}/pre_c", maxdepth=1, detail=True)[f"{root}/pre_c"]["size"] == 1
