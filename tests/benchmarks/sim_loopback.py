"""Print the speed of the simulated server alone: loopback rate, pacing and latency compared with the model.

python tests/benchmarks/sim_loopback.py
"""

import socket
import statistics
import tempfile
import threading
import time
from urllib.parse import urlsplit

from cachedfs.sim import GCSServer, Profile
from cachedfs.sim.network import Delay

SIZE = 192 << 20


def fetch(
    url: str, key: str, span: tuple[int, int] | None = None, *, sock: socket.socket | None = None
) -> int:
    """Return how many bytes of a body were received, read in large pieces by a bare socket."""
    address = urlsplit(url)
    own = sock is None
    sock = sock or socket.create_connection((address.hostname, address.port))
    observe_range = f"Range: bytes={span[0]}-{span[1] - 1}\r\n" if span else ""
    sock.sendall(f"GET /b/{key} HTTP/1.1\r\nHost: sim\r\n{observe_range}\r\n".encode())
    buffer, got = bytearray(4 << 20), b""
    while b"\r\n\r\n" not in got:
        got += sock.recv(65536)
    head, _, body = got.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"\r\ncontent-length: ")[1].split(b"\r\n")[0])
    n = len(body)
    while n < length:
        if not (more := sock.recv_into(buffer)):
            raise ConnectionError(f"{key}: the body ended after {n} of {length} bytes")
        n += more
    if own:
        sock.close()
    return n


def parallel(url: str, n_streams: int) -> float:
    """Return the seconds that n streams of equal size take together."""
    step = SIZE // n_streams
    threads = [
        threading.Thread(target=fetch, args=(url, "big", (i * step, (i + 1) * step)))
        for i in range(n_streams)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for where in (None, folder):
            with GCSServer("off", folder=where, process=True) as server:
                start = time.perf_counter()
                server.put("b", "big", bytes(SIZE))
                seeded = time.perf_counter() - start
                fetch(server.endpoint_url, "big")
                times = []
                for _ in range(5):
                    start = time.perf_counter()
                    fetch(server.endpoint_url, "big")
                    times.append(time.perf_counter() - start)
                rate = SIZE / statistics.median(times) / 1e9
                print(
                    f"{'folder' if where else 'memory'}: one stream {rate:.2f} GB/s; seeding {seeded:.2f} s"
                )

    for process in (True, False):
        flat = Profile(media=Delay(0.045), stream_rate=60e6, total_rate=200e6)
        with GCSServer(flat, process=process) as server:
            server.put("b", "big", bytes(SIZE))
            name = "process" if process else "thread"
            for n in (24, 4, 1):
                model = 0.045 + SIZE / min(60e6 * n, 200e6)
                took = parallel(server.endpoint_url, n)
                print(f"{name}: {n:2} streams {took:.4f} s, model {model:.4f} s ({took / model - 1:+.2%})")
            for size in (8 << 10, 64 << 10):
                server.put("b", "small", bytes(size))
                address = urlsplit(server.endpoint_url)
                with socket.create_connection((address.hostname, address.port)) as sock:
                    start = time.perf_counter()
                    for _ in range(40):
                        fetch(server.endpoint_url, "small", sock=sock)
                    took = (time.perf_counter() - start) / 40
                model = 0.045 + size / 60e6
                print(f"{name}: {size >> 10} KiB {took * 1e3:.3f} ms, model {model * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
