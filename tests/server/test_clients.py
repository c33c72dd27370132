"""Programs that speak S3 or HTTP read through the endpoint: the right bytes, and the second time without a request.

Those that are large are marked `works`: `make works` installs them.
"""

import io
import json
import os
import shutil
import subprocess

import fsspec
import pytest

import cachedfs
from tests.server.served import boto3_client
from tests.support import AGE_S, Cloud, MiB, noise

DATA = noise(3 * MiB + 5)
ROWS = {"n": list(range(5000)), "text": [f"row {n}" for n in range(5000)]}
SUM = sum(ROWS["n"])


@pytest.fixture(scope="module")
def running(gcs_server, tmp_path_factory):
    """One endpoint for all clients."""
    cloud = Cloud(gcs_server, "clients", tmp_path_factory.mktemp("cache"))
    gcs_server.make_bucket(cloud.bucket)
    options = {"gs": {"token": "anon", "endpoint_url": gcs_server.endpoint_url}}
    options |= {"cache_dir": str(cloud.cache_dir), "keep_free": 0}
    with cachedfs.serve({"data": f"gs://{cloud.bucket}/top"}, max_age=AGE_S, **options) as server:
        yield server, cloud, fsspec.filesystem("cachedfs", target_protocol="gs", **options)


@pytest.fixture
def server(running):
    """The endpoint with the bucket `data`: a.bin, a.parquet, texts/0.txt and so on, in versions that nobody has read."""
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    server, cloud, fs = running
    buffer = io.BytesIO()
    pq.write_table(pa.table(ROWS), buffer, row_group_size=1000)
    cloud.put("top/a.bin", DATA)
    cloud.put("top/a.parquet", buffer.getvalue())
    for number in range(3):
        cloud.put(f"top/texts/{number}.txt", b"text %d" % number)
    fs.invalidate_cache()
    return server


@pytest.fixture
def cloud(running):
    return running[1]


@pytest.fixture
def twice(cloud):
    """Let a loop run twice, the second time without a request to the origin."""

    def loop():
        cloud.asked()
        yield 1
        assert cloud.asked()
        yield 2
        assert cloud.asked() == []

    return loop


@pytest.fixture
def upload(cloud):
    """Copy a local folder into the bucket for this test, as its writer would have done elsewhere."""
    keys = []

    def copy(folder, prefix):
        for path in folder.rglob("*"):
            if path.is_file():
                keys.append(f"top/{prefix}/{path.relative_to(folder)}")
                cloud.put(keys[-1], path.read_bytes())

    yield copy
    for key in keys:
        cloud.delete(key)


def test_boto3(server, twice):
    for _ in twice():
        s3 = boto3_client(server.url, server.access_key, server.secret_key)
        assert s3.get_object(Bucket="data", Key="a.bin")["Body"].read() == DATA
        s3.download_fileobj("data", "a.bin", found := io.BytesIO())  # several ranges at a time
        assert found.getvalue() == DATA
        pages = s3.get_paginator("list_objects_v2").paginate(
            Bucket="data", Prefix="texts/", PaginationConfig={"PageSize": 2}
        )
        keys = [each["Key"] for page in pages for each in page["Contents"]]
        assert keys == [f"texts/{number}.txt" for number in range(3)]
        with pytest.raises(s3.exceptions.NoSuchKey):
            s3.get_object(Bucket="data", Key="texts/none")
        s3.close()


def test_s3fs(server, twice):
    pytest.importorskip("s3fs")
    for _ in twice():
        keys = {"key": server.access_key, "secret": server.secret_key}
        fs = fsspec.filesystem("s3", endpoint_url=server.url, skip_instance_cache=True, **keys)
        assert fs.cat_file("data/a.bin", start=5, end=9) == DATA[5:9]
        assert fs.cat_file("data/a.bin") == DATA
        assert fs.ls("data/texts", detail=False) == [f"data/texts/{number}.txt" for number in range(3)]
        with fs.open("data/a.bin") as file:  # pins the ETag
            file.seek(-5, 2)
            assert file.read() == DATA[-5:]


def test_obstore(server, twice):
    stores = pytest.importorskip("obstore.store")
    for _ in twice():
        store = stores.S3Store("data", config=server.storage_options, client_options={"allow_http": True})
        assert bytes(store.get("a.bin").bytes()) == DATA
        assert bytes(store.get("a.bin", options={"range": {"suffix": 7}}).bytes()) == DATA[-7:]
        assert bytes(store.get_range("a.bin", start=MiB - 1, length=3)) == DATA[MiB - 1 : MiB + 2]
        etag = store.head("a.bin")["e_tag"]
        assert bytes(store.get("a.bin", options={"if_match": etag}).bytes()) == DATA
        assert [each["path"] for page in store.list("texts") for each in page] == [
            f"texts/{number}.txt" for number in range(3)
        ]
        assert store.list_with_delimiter()["common_prefixes"] == ["texts"]
        with pytest.raises(FileNotFoundError):
            store.get("none")


def test_zarr_over_obstore(server, twice, upload, tmp_path):
    stores, zarr = pytest.importorskip("obstore.store"), pytest.importorskip("zarr")
    array = zarr.create_array(tmp_path / "a.zarr", shape=(100, 10), chunks=(10, 10), dtype="i4")
    array[:] = 7
    upload(tmp_path / "a.zarr", "a.zarr")
    for _ in twice():
        store = stores.S3Store("data", prefix="a.zarr", config=server.storage_options)
        found = zarr.open_array(zarr.storage.ObjectStore(store, read_only=True), mode="r")
        assert int(found[:].sum()) == 7000


def test_tensorstore(server, twice, upload, tmp_path, monkeypatch):
    tensorstore, zarr = pytest.importorskip("tensorstore"), pytest.importorskip("zarr")
    zarr.create_array(tmp_path / "a.zarr", shape=(100,), chunks=(10,), dtype="i4")[:] = 7
    upload(tmp_path / "a.zarr", "a.zarr")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    store = {"driver": "s3", "bucket": "data", "path": "a.zarr/"}
    store |= {"endpoint": server.url, "aws_region": "us-east-1"}
    for _ in twice():
        found = tensorstore.open({"driver": "zarr3", "kvstore": store}).result()
        assert int(found.read().result().sum()) == 700


def test_pyarrow(server, twice):
    fs_module, pq = pytest.importorskip("pyarrow.fs"), pytest.importorskip("pyarrow.parquet")
    for _ in twice():
        keys = {"access_key": server.access_key, "secret_key": server.secret_key}
        fs = fs_module.S3FileSystem(endpoint_override=server.url, region="us-east-1", **keys)
        assert sum(pq.read_table("data/a.parquet", filesystem=fs)["n"].to_pylist()) == SUM
        assert fs.open_input_file("data/a.bin").read() == DATA
        found = fs.get_file_info(fs_module.FileSelector("data", recursive=True))
        assert [each.path for each in found if each.is_file][:1] == ["data/a.bin"]
        assert fs.get_file_info("data/none").type == fs_module.FileType.NotFound
        assert fs.get_file_info("data/texts").type == fs_module.FileType.Directory


def test_fsspecs_http_filesystem(server, twice):
    url = server.url.replace("://", f"://{server.access_key}:{server.secret_key}@")
    for _ in twice():
        with fsspec.open(f"{url}/data/a.bin") as file:
            file.seek(MiB)
            assert file.read(10) == DATA[MiB : MiB + 10]
        found = fsspec.filesystem("http").find(f"{url}/data/texts/")
        assert [path.rpartition("/")[2] for path in found] == [f"{number}.txt" for number in range(3)]


def test_curl(server, twice):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    user = f"{server.access_key}:{server.secret_key}"
    for _ in twice():
        plain = f"curl -sf -u {user} -r 5-9 {server.url}/data/a.bin"
        assert subprocess.check_output(plain.split()) == DATA[5:10]
        signed = f"curl -sf --aws-sigv4 aws:amz:us-east-1:s3 -u {user} {server.url}/data/texts/1.txt"
        assert subprocess.check_output(signed.split()) == b"text 1"


@pytest.mark.works
def test_polars(server, twice):
    pl = pytest.importorskip("polars")
    for _ in twice():
        frame = pl.scan_parquet("s3://data/*.parquet", storage_options=server.storage_options)
        assert frame.filter(pl.col("n") >= 4990).collect()["n"].to_list() == list(range(4990, 5000))
        assert frame.select(pl.col("n").sum()).collect().item() == SUM


@pytest.mark.works
def test_deltalake(server, twice, upload, tmp_path):
    deltalake, pa = pytest.importorskip("deltalake"), pytest.importorskip("pyarrow")
    for part in range(2):
        deltalake.write_deltalake(tmp_path / "table", pa.table({"n": [part]}), mode="append")
    upload(tmp_path / "table", "table")
    for _ in twice():
        table = deltalake.DeltaTable("s3://data/table", storage_options=server.storage_options)
        found = pa.table(table.to_pyarrow_table() if hasattr(table, "to_pyarrow_table") else table.to_arrow())
        assert sorted(found["n"].to_pylist()) == [0, 1]


@pytest.mark.works
def test_lance(server, twice, upload, tmp_path):
    lance, pa = pytest.importorskip("lance"), pytest.importorskip("pyarrow")
    lance.write_dataset(pa.table(ROWS), tmp_path / "a.lance")
    upload(tmp_path / "a.lance", "a.lance")
    for _ in twice():
        found = lance.dataset("s3://data/a.lance", storage_options=server.storage_options)
        assert found.to_table(filter="n >= 4990")["n"].to_pylist() == list(range(4990, 5000))
        assert found.take([7])["text"].to_pylist() == ["row 7"]


@pytest.mark.works
def test_lancedb(server, twice, upload, tmp_path):
    lancedb = pytest.importorskip("lancedb")
    lancedb.connect(tmp_path / "db").create_table("t", [{"n": n, "vector": [n, 1.0]} for n in range(100)])
    upload(tmp_path / "db", "db")
    for _ in twice():
        table = lancedb.connect("s3://data/db", storage_options=server.storage_options).open_table("t")
        assert table.search([7.0, 1.0]).limit(1).to_list()[0]["n"] == 7


@pytest.mark.works
def test_icechunk(server, twice, upload, tmp_path):
    icechunk, zarr = pytest.importorskip("icechunk"), pytest.importorskip("zarr")
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(tmp_path / "repo")))
    session = repository.writable_session("main")
    zarr.create_array(session.store, name="a", shape=(100,), chunks=(10,), dtype="i4")[:] = 7
    session.commit("first")
    upload(tmp_path / "repo", "repo")
    for _ in twice():
        at = {"bucket": "data", "prefix": "repo", "region": "us-east-1", "endpoint_url": server.url}
        keys = {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
        storage = icechunk.s3_storage(**at, **keys, allow_http=True, force_path_style=True)
        store = icechunk.Repository.open(storage).readonly_session("main").store
        assert int(zarr.open_group(store, mode="r")["a"][:].sum()) == 700


@pytest.mark.works
def test_datafusion(server, twice):
    datafusion = pytest.importorskip("datafusion")
    from datafusion.object_store import AmazonS3

    for _ in twice():
        context = datafusion.SessionContext()
        keys = {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
        at = {"bucket_name": "data", "endpoint": server.url, "region": "us-east-1"}
        store = AmazonS3(**at, **keys, allow_http=True)
        context.register_object_store("s3://", store, host="data")
        context.register_parquet("t", "s3://data/a.parquet")
        assert context.sql("SELECT sum(n) AS s FROM t").to_pydict() == {"s": [SUM]}


@pytest.mark.works
def test_daft(server, twice):
    daft = pytest.importorskip("daft")
    for _ in twice():
        keys = {"key_id": server.access_key, "access_key": server.secret_key}
        config = daft.io.S3Config(endpoint_url=server.url, region_name="us-east-1", **keys)
        frame = daft.read_parquet("s3://data/a.parquet", io_config=daft.io.IOConfig(s3=config))
        assert frame.sum("n").to_pydict() == {"n": [SUM]}


def run(server, tmp_path, *command):
    """Run a program with the environment of the endpoint; return its output."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment = {**inherited, **server.environment, "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.works
def test_aws_command_line(server, twice, tmp_path):
    if shutil.which("aws") is None:
        pytest.skip("needs the AWS command line")
    for number in twice():
        assert "PRE texts/" in run(server, tmp_path, "aws", "s3", "ls", "s3://data/")
        target = tmp_path / f"a{number}.bin"
        run(server, tmp_path, "aws", "s3", "cp", "s3://data/a.bin", str(target))
        assert target.read_bytes() == DATA
        folder = tmp_path / f"texts{number}"
        run(server, tmp_path, "aws", "s3", "sync", "s3://data/texts", str(folder))
        assert sorted(path.read_text() for path in folder.iterdir()) == [f"text {n}" for n in range(3)]
        listed = json.loads(run(server, tmp_path, "aws", "s3api", "list-objects-v2", "--bucket", "data"))
        assert len(listed["Contents"]) == 5


@pytest.mark.works
def test_rclone(server, twice, tmp_path):
    if shutil.which("rclone") is None:
        pytest.skip("needs rclone")
    remote = f":s3,provider=Other,env_auth,endpoint='{server.url}':data"
    for number in twice():
        folder = tmp_path / f"copy{number}"
        run(server, tmp_path, "rclone", "copy", remote, str(folder))
        assert (folder / "a.bin").read_bytes() == DATA
        assert (folder / "texts/2.txt").read_text() == "text 2"


@pytest.mark.works
def test_duckdb(server, twice):
    duckdb = pytest.importorskip("duckdb")
    host = server.url.partition("://")[2]
    for _ in twice():
        with duckdb.connect() as con:
            try:
                con.install_extension("httpfs")
            except duckdb.Error:
                pytest.skip("its extension httpfs cannot be installed here")
            con.sql(
                f"CREATE SECRET (TYPE s3, KEY_ID '{server.access_key}', SECRET '{server.secret_key}', "
                f"ENDPOINT '{host}', USE_SSL false, URL_STYLE 'path')"
            )
            assert con.sql("SELECT sum(n) FROM 's3://data/*.parquet'").fetchall() == [(SUM,)]
