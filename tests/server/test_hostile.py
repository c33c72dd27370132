"""Hostile and malformed requests: each gets an error or a closed connection, and the endpoint goes on."""

import socket

import pytest

from cachedfs.server import worker
from tests.server.served import Served
from tests.support import until

HEAD = "GET /data/a HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def served(origin, serving):
    origin.put("b/top/a", b"public")
    served = serving({"data": "cachedfs::gs://b/top"}, keys=None)
    yield served
    assert served.get("/data/a", signed=False).body == b"public"


@pytest.mark.parametrize(
    "sent",
    [
        "\0" * 100,
        "\r\n" * 3 + "nonsense\r\n\r\n",
        "GET /data/a\r\n\r\n",
        "GET /data/a HTTP/9.9\r\n\r\n",
        "GET /data/\0a HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"{HEAD}Name : value\r\n\r\n",
        f"{HEAD}Content-Length: -1\r\n\r\n",
        f"{HEAD}Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        f"{HEAD}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        f"{HEAD}Transfer-Encoding: chunked\r\n\r\nxyz\r\n",
        f"GET /data/{'a' * 20_000} HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"{HEAD}A: {'a' * 20_000}\r\n\r\n",
        HEAD + "".join(f"A{number}: 1\r\n" for number in range(1000)) + "\r\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
)  # fmt: skip
def test_what_is_no_request(served, sent):
    answer = served.raw(f"{sent}GET /data/a HTTP/1.0\r\n\r\n".encode("latin-1"))
    assert b"public" not in answer
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /data/a HTTP/1.1\r\n", 400),  # no Host
        ("GET /data/a HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n", 400),
        ("GET http://evil.com/data/a HTTP/1.1\r\nHost: localhost\r\n", 400),
        ("CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n", 400),
        ("GET /data/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n", 400),
        ("GET /data/\xff HTTP/1.1\r\nHost: localhost\r\n", 400),
        ("GET /data/a%0d%0aX:1 HTTP/1.1\r\nHost: localhost\r\n", 404),
        ("GET /data/a HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n", 200),
        ("GET /data?list-type=2&prefix=%ff%00%0a HTTP/1.1\r\nHost: localhost\r\n", 200),
        ("GET /data/a HTTP/1.1\r\nHost: localhost\r\nAuthorization: AWS4-HMAC-SHA256 \r\n", 200),
        ("GET /data/a HTTP/1.1\r\nHost: localhost\r\nIf-Modified-Since: Sat, 01 Jan 99999 00:00:00 GMT\r\n", 200),
    ],
)  # fmt: skip
def test_what_is_an_odd_request(served, head, status):
    answer = served.raw(f"{head}Connection: close\r\n\r\n".encode("latin-1")).decode()
    assert int(answer[9:12]) in ((400, 403) if status == 400 else (status,))  # by releases of aiohttp
    assert "\r\nX:1" not in answer


def test_a_log_line_is_one_line(served, caplog):
    caplog.set_level("DEBUG")
    served.raw(b"GET /data/a%0aERROR%20forged HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    served.raw(f"{HEAD}A\0: Secret\r\n\r\n".encode())
    assert all("\n" not in line for line in caplog.messages if "data" in line)


def test_a_client_that_sends_slowly_is_disconnected(origin, monkeypatch):
    monkeypatch.setattr(worker, "IDLE_S", 0.1)
    served = Served({}, keys=None)
    try:
        with socket.create_connection(("127.0.0.1", served.port)) as sock:
            sock.sendall(b"GET /data/a HTTP/1.1\r\nHost: ")
            assert sock.recv(1) == b""
    finally:
        served.close()


def test_a_client_that_takes_nothing_is_disconnected(served, origin, monkeypatch):
    monkeypatch.setattr("cachedfs.server.endpoint.STALLED_S", 0.1)
    origin.put("b/top/big", bytes(64 << 20))
    with socket.create_connection(("127.0.0.1", served.port)) as sock:
        sock.sendall(b"GET /data/big HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: served.endpoint._n_active == 1)
        until(lambda: served.endpoint._n_active == 0)


def test_a_client_that_leaves_frees_its_place(served, origin):
    origin.put("b/top/big", bytes(64 << 20))
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", served.port)) as sock:
            sock.sendall(b"GET /data/big HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(1)
    until(lambda: served.endpoint._n_active == 0)
