"""URL forms and the methods of fsspec. Other libraries are in tests/libraries."""

import http.server
import pathlib

import fsspec
import pytest
from fsspec.callbacks import Callback
from fsspec.generic import rsync

from tests.support import KiB, MiB, WebServer, files_below, forget, noise

ROWS = "n\n" + "".join(f"{i}\n" for i in range(5000))

uploading = pytest.mark.filterwarnings("ignore:Sending a large body directly")  # raised by gcsfs in aiohttp


# URL forms and options.


@pytest.mark.parametrize(
    ("prefix", "name"),
    [
        ("cachedfs::gs://", "gs"), ("cachedfs::gcs://", "gcs"),
        ("cgs://", "gs"), ("cgs://", "gcs"), ("cgs://", "target_options"),
    ],
)  # fmt: skip
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


# Methods of fsspec.


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


@uploading
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


def test_find_glob_walk_and_du_agree(cloud, fs):
    tree = {f"t/{a}/{b}.txt": noise(10 * a + b, b) for a in range(3) for b in range(4)}
    for key, data in tree.items():
        cloud.put(key, data)
    paths = sorted(map(cloud.path, tree))
    for form in ("", "gs://", "cachedfs::gs://"):
        top = cloud.url("t", form)
        assert fs.find(top) == paths
        assert fs.glob(f"{top}/**/*.txt") == paths
        assert fs.glob(f"{top}/1/*") == [path for path in paths if "/1/" in path]
        assert fs.glob(f"{top}/*") == [cloud.path(f"t/{a}") for a in range(3)]
        walked = {root: (sorted(dirs), sorted(files)) for root, dirs, files in fs.walk(top)}
        assert walked[cloud.path("t")] == (["0", "1", "2"], [])
        assert walked[cloud.path("t/2")] == ([], [f"{b}.txt" for b in range(4)])
        assert fs.du(top) == sum(map(len, tree.values()))
        assert fs.du(top, total=False) == {cloud.path(key): len(data) for key, data in tree.items()}
        assert sorted(fs.expand_path(top, recursive=True, maxdepth=2)) == sorted(
            [cloud.path("t"), *(cloud.path(f"t/{a}") for a in range(3)), *paths]
        )
    assert fs.find(cloud.path("t"), prefix="1/2", maxdepth=2) == [cloud.path("t/1/2.txt")]
    assert fs.du(cloud.path("t/1/2.txt"), maxdepth=1) == 12
    cloud.put("t/new", b"new")
    assert fs.find(cloud.path("t"), maxdepth=1, refresh=True) == [cloud.path("t/new")]
    cloud.delete("t/new")
    assert fs.find(cloud.path("t"), refresh=True) == paths
    assert fs.find(cloud.path("t"), maxdepth=1) == []
    assert fs.find(cloud.path("t"), maxdepth=1, withdirs=True) == [
        cloud.path("t"),
        *(cloud.path(f"t/{a}") for a in range(3)),
    ]
    assert fs.sizes([cloud.path("t/1/1.txt"), cloud.path("t/2/1.txt")]) == [11, 21]


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


@pytest.fixture
def web(tmp_path):
    """The URL of a web server with one file."""
    (tmp_path / "rows.csv").write_text(ROWS)

    class Chunked(http.server.SimpleHTTPRequestHandler):
        def send_header(self, name, value):
            """On request, leave out the size and everything that distinguishes versions."""
            if "chunked" not in self.path or name not in ("Content-Length", "Last-Modified"):
                super().send_header(name, value)

    with WebServer(tmp_path, Chunked) as server:
        yield server.url
        forget()  # closes the connections


@pytest.mark.parametrize("query", ["", "?sig=1"])
def test_one_web_page_is_read_and_found_by_every_method(web, tmp_path, query):
    data = (tmp_path / "rows.csv").read_bytes()
    url = f"{web}/rows.csv{query}"
    fs = fsspec.filesystem("cachedfs", target_protocol="http")
    for _ in range(2):
        assert fs.cat(url) == data
        assert fs.cat([url]) == {url: data}
        assert fs.cat([url], recursive=True) == {url: data}
        assert fs.expand_path(url) == fs.expand_path(url, recursive=True) == fs.find(url) == [url]
        assert fs.glob(url) == [url]
        assert fs.du(url) == len(data)
        fs.get([url], [str(tmp_path / "got")])
        assert (tmp_path / "got").read_bytes() == data
    with pytest.raises(FileNotFoundError):
        fs.cat([url, f"{web}/nothing{query}"])
    forget()
    fs = fsspec.filesystem("cachedfs", target_protocol="http")
    assert fs.prefetch([url]).wait().errors == 0
    assert fs.cached_extent(url) == [(0, len(data))]


def test_a_web_page_without_a_size_is_read_by_every_method(web, tmp_path):
    data, url = (tmp_path / "rows.csv").read_bytes(), f"{web}/rows.csv?chunked"
    fs = fsspec.filesystem("cachedfs", target_protocol="http")
    with pytest.warns(UserWarning, match="does not say when an object has changed"):
        assert fs.cat_file(url) == data
    for _ in range(2):
        with fs.open(url) as file:
            assert (file.read(5), file.read()) == (data[:5], data[5:])
        fs.get_file(url, tmp_path / "got")
        assert (tmp_path / "got").read_bytes() == data
        assert fs.head(url, 7) == data[:7]
        assert fs.tail(url, 7) == data[-7:]
        with fs.local_path(url) as local:
            assert pathlib.Path(local).read_bytes() == data
        assert fs.info(url)["type"] == "file"
        fs.invalidate_cache()
