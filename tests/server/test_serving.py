"""`cachedfs.serve`: processes of their own, what they are told, and how they end."""

import socket
import ssl
import subprocess
import sys
import textwrap
import urllib.request

import fsspec
import psutil
import pytest

import cachedfs
from cachedfs.server import serving
from tests.server.served import boto3_client
from tests.support import MiB, noise, until


def client(server):
    return boto3_client(server.url, server.access_key, server.secret_key)


@pytest.fixture
def told(monkeypatch):
    """Return a function that calls `serve` and returns what its workers would be told; none is started."""

    def serve(*args, **options):
        found = {}

        def start(settings, scheme, host, sockets):
            found.update(settings)
            for sock in sockets:
                sock.close()

        monkeypatch.setattr(serving, "S3Server", start)
        cachedfs.serve(*args, **options)
        return found

    return serve


def test_it_serves_with_the_configuration_of_this_process_and_ends_after_its_last_answer(cloud):
    data = cloud.put("top/a", noise(5 * MiB))
    with cachedfs.serve({"data": f"gs://{cloud.bucket}/top"}) as server:
        for _ in range(2):
            assert client(server).get_object(Bucket="data", Key="a")["Body"].read() == data
            n_asked = len(cloud.server.requests)
        assert len(cloud.server.requests) == n_asked
        address = server.environment["AWS_ENDPOINT_URL"]
        assert server.storage_options["aws_endpoint_url"] == server.url == address
        # The cache is that of this process.
        assert fsspec.url_to_fs(cloud.url())[0].cat_file(cloud.path("top/a")) == data
        assert len(cloud.server.requests) == n_asked
        last = cloud.put("top/last", noise(MiB, seed=1))
        body = client(server).get_object(Bucket="data", Key="last")["Body"]
        server.close()
        assert body.read() == last
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))


def test_options_are_for_the_origins_that_they_name(tmp_path, told):
    gs = {"gs": {"token": "anon"}}
    found = told({"one": str(tmp_path), "two": "cgs://b"}, max_age=5, **gs)
    assert found["buckets"] == {
        "one": (f"cachedfs::file://{tmp_path}", {"max_age": 5}),
        "two": ("cgs://b", {"max_age": 5, **gs}),
    }


def test_workers_share_the_port_and_the_cache(cloud):
    data = cloud.put("a", noise(MiB))
    with cachedfs.serve({"data": f"gs://{cloud.bucket}"}, workers=2, anonymous=True) as server:
        processes = list(server._processes)
        for _ in range(10):  # each with a connection of its own
            assert urllib.request.urlopen(f"{server.url}/data/a").read() == data
        assert cloud.asked().count("media") == 1
        assert len({process.pid for process in processes}) == 2
    assert [process.returncode for process in processes] == [0, 0]


def test_it_ends_with_the_process_that_started_it(cloud):
    code = f"""
        import cachedfs, sys
        server = cachedfs.serve({{"data": "gs://{cloud.bucket}"}})
        print(server.url, *(process.pid for process in server._processes), flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(
        command, env=cloud._environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pid = int(process.stdout.readline().split()[1])
        process.kill()
    until(lambda: not psutil.pid_exists(pid))


def test_what_cannot_be_served_is_an_error_here(cloud, tmp_path):
    with pytest.raises(OSError, match=r"cannot serve: cachedfs has no option 'max_aeg'"):
        cachedfs.serve({"data": f"gs://{cloud.bucket}"}, max_aeg=1)
    with pytest.raises(TypeError, match="a object object cannot be given to another process"):
        cachedfs.serve({"data": f"gs://{cloud.bucket}"}, gs={"token": object()})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for workers in (1, 2):
            with pytest.raises(OSError, match=f"port {port} of 127.0.0.1: Address already in use; port 0"):
                cachedfs.serve({"data": "gs://b"}, port=port, workers=workers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"access_key": "a"}, "both access_key and secret_key"),
        ({"tls_cert": "a"}, "both tls_cert and tls_key"),
        ({"anonymous": True, "host": "0.0.0.0"}, "others reach 0.0.0.0"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        cachedfs.serve({"data": "gs://b"}, **options)


@pytest.mark.parametrize("name", ["x", "Data", "a/b", "", "-ab", "a" * 64])
def test_a_name_that_no_bucket_has(name):
    with pytest.raises(ValueError, match="is no name of a bucket"):
        cachedfs.serve({name: "gs://b"})


def test_who_else_can_read_is_a_warning(told, caplog):
    assert told({"data": "gs://b"}, anonymous=True)["keys"] is None
    assert "every user of this machine can read" in caplog.text
    assert told({"data": "gs://b"}, host="0.0.0.0")["keys"]
    assert "others reach 0.0.0.0 without encryption" in caplog.text


def test_tls(cloud, certificate):
    cloud.put("a", b"1")
    cert, key = certificate
    options = {"host": "localhost", "tls_cert": cert, "tls_key": key, "anonymous": True}
    with cachedfs.serve({"data": f"gs://{cloud.bucket}"}, **options) as server:
        assert server.url.startswith("https://localhost:")
        context = ssl.create_default_context(cafile=cert)
        assert urllib.request.urlopen(f"{server.url}/data/a", context=context).read() == b"1"


@pytest.fixture
def certificate(tmp_path):
    """A certificate of localhost and its key, in files."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*made.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    return str(cert), str(key)
