"""The S3 endpoint beside nginx and a bare aiohttp handler: ranges of one cached file, with keep-alive.

`python -m tests.benchmarks.served [--workers N]`. The processor time is that of the serving processes alone, so a busy
machine changes it less than the rates. Without nginx its rows are missing. Then, where polars is installed: a Parquet file of
30 MB at an origin that answers after 45 ms, read by polars itself and through the endpoint, for the first time and again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

import cachedfs
from cachedfs.sim import GCSServer

SIZE = 64 << 20
CLIENTS = 4
RUNS = {"64 KiB ranges": (64 << 10, 3000), "8 MiB ranges": (8 << 20, 60)}  # bytes, requests of each client
NGINX = """
daemon off; worker_processes 1; pid {0}/pid; error_log {0}/log;
events {{}}
http {{ access_log off; sendfile on; keepalive_requests 1000000; server {{ listen 127.0.0.1:{1}; root {0}; }} }}
"""
BARE = """
import asyncio, os, re, sys
from aiohttp import web

PIECE, fd = 1 << 20, os.open(sys.argv[1], os.O_RDONLY)

async def handle(request):
    start, last = map(int, re.findall("[0-9]+", request.headers["Range"]))
    if last - start < PIECE:
        return web.Response(status=206, body=os.pread(fd, last + 1 - start, start))
    response = web.StreamResponse(status=206)
    response.content_length = last + 1 - start
    await response.prepare(request)
    for at in range(start, last + 1, PIECE):
        await response.write(os.pread(fd, min(PIECE, last + 1 - at), at))
    return response

async def main():
    server = web.Server(handle, access_log=None)
    await asyncio.get_running_loop().create_server(server, "127.0.0.1", int(sys.argv[2]))
    await asyncio.Event().wait()

asyncio.run(main())
"""
Signer = Callable[[dict[str, str], str], dict[str, str]]


def request_of(port: int, path: str, start: int, size: int, sign: Signer) -> bytes:
    headers = {"Host": f"127.0.0.1:{port}", "Range": f"bytes={start}-{start + size - 1}"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in sign(headers, path).items())
    return f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode()


def read(port: int, requests: list[bytes], size: int, n: int) -> None:
    """Send `n` requests over one connection; take the body of each."""
    buffer = memoryview(bytearray(1 << 20))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for number in range(n):
            sock.sendall(requests[number % len(requests)])
            got = sock.recv_into(buffer)
            head, _, body = bytes(buffer[:got]).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 206"), head
            left = size - len(body)
            while left:
                left -= sock.recv_into(buffer[: min(left, len(buffer))])


def cpu_s(pids: list[int]) -> float:
    """Return the processor time of processes."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def measure(what: str, name: str, port: int, pids: list[int], path: str, sign: Signer) -> None:
    size, n = RUNS[what]
    requests = [request_of(port, path, at, size, sign) for at in range(0, SIZE, size)][:200]
    read(port, requests, size, len(requests))  # opens files, checks pages
    arguments = (port, requests, size, n)
    clients = [multiprocessing.Process(target=read, args=arguments) for _ in range(CLIENTS)]
    began, used = time.perf_counter(), cpu_s(pids)
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    took, used, total = time.perf_counter() - began, cpu_s(pids) - used, n * CLIENTS
    rate = f"{total / took:8,.0f}/s {total * size / took / 1e6:7,.0f} MB/s"
    print(
        f"{what:14} {name:12} {rate}   {used / total * 1e6:7,.0f} us of processor time a request", flush=True
    )


@contextlib.contextmanager
def running(*command: object, port: int) -> Iterator[int]:
    """Run a server; yield its pid once it answers."""
    with subprocess.Popen([str(each) for each in command]) as process:
        try:
            while True:
                with contextlib.suppress(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                time.sleep(0.05)
            yield process.pid
        finally:
            process.terminate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def main(workers: int) -> None:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)  # nginx reads it as another user
    (folder / "a.bin").write_bytes(data := os.urandom(SIZE))
    nginx, bare = free_port(), free_port()
    (folder / "nginx.conf").write_text(NGINX.format(folder, nginx))
    rows: list[tuple[str, int, list[int], str, Signer]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        if program := shutil.which("nginx"):
            pid = stack.enter_context(running(program, "-c", folder / "nginx.conf", port=nginx))
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            rows.append(("nginx", nginx, list(map(int, children)), "/a.bin", lambda headers, path: headers))
        pid = stack.enter_context(running(sys.executable, "-c", BARE, folder / "a.bin", bare, port=bare))
        rows.append(("bare aiohttp", bare, [pid], "/a.bin", lambda headers, path: headers))
        cloud = stack.enter_context(GCSServer(process=True))
        cloud.put("b", "a.bin", data)
        options = {
            "gs": {"token": "anon", "endpoint_url": cloud.endpoint_url},
            "cache_dir": str(folder / "cache"),
        }
        server = stack.enter_context(
            cachedfs.serve({"data": "gs://b"}, workers=workers, keep_free=0, max_age="immutable", **options)
        )

        def sign(headers: dict[str, str], path: str) -> dict[str, str]:
            request = AWSRequest("GET", f"http://{headers['Host']}{path}", headers)
            keys = Credentials(server.access_key, server.secret_key)
            S3SigV4Auth(keys, "s3", "us-east-1").add_auth(request)
            return dict(request.headers)

        pids = [process.pid for process in server._processes]
        rows.append(("serve", int(server.url.rpartition(":")[2]), pids, "/data/a.bin", sign))
        for what in RUNS:
            for _ in range(3):  # in turn: the machine is not the same all the time
                for row in rows:
                    measure(what, *row)


def read_parquet(url: str, options: dict[str, str]) -> float:
    """Return the seconds that polars takes for the sums of all columns."""
    import polars as pl

    began = time.perf_counter()
    pl.scan_parquet(url, storage_options=options).select(pl.all().sum()).collect()
    return time.perf_counter() - began


def measure_polars() -> None:
    import numpy as np
    import polars as pl

    columns, file = np.random.default_rng(0).random((4, 1_000_000)), io.BytesIO()
    pl.DataFrame({f"c{number}": each for number, each in enumerate(columns)}).write_parquet(
        file, row_group_size=125_000
    )
    found: dict[str, list[float]] = {"polars itself": [], "serve, first": [], "serve, again": []}
    with GCSServer("table", process=True) as cloud:
        cloud.put("b", "a.parquet", file.getvalue())
        account = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        account |= {"gcs_base_url": cloud.endpoint_url, "disable_oauth": True}
        itself = {"google_service_account_key": json.dumps(account), "allow_http": "true"}
        read_parquet("gs://b/a.parquet", itself)  # loads its code
        for _ in range(5):
            found["polars itself"].append(read_parquet("gs://b/a.parquet", itself))
            with tempfile.TemporaryDirectory() as folder:
                gs = {"token": "anon", "endpoint_url": cloud.endpoint_url}
                with cachedfs.serve({"data": "gs://b"}, gs=gs, cache_dir=folder, keep_free=0) as server:
                    for each in ("serve, first", *["serve, again"] * 4):
                        found[each].append(read_parquet("s3://data/a.parquet", server.storage_options))
    for name, seconds in found.items():
        print(f"30 MB of Parquet  {name:14} {statistics.median(seconds):.3f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    main(parser.parse_args().workers)
    if importlib.util.find_spec("polars"):
        measure_polars()
