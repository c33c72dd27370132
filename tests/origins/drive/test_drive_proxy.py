"""Drive through an HTTP proxy: tokens, listings and bytes."""

from __future__ import annotations

import base64
import socket
import socketserver
import ssl
import threading
import traceback
from contextlib import suppress

import pytest

from cachedfs.common.types import ObjectInfo
from cachedfs.errors import OriginUnreachable
from cachedfs.origins.proxy import proxy_of, tls_context
from cachedfs.origins.retry import RetryPolicy
from tests.origins.contract import names, read
from tests.origins.drive.certificates import certify

GOOGLE = ("www.googleapis.com", "oauth2.googleapis.com")


class Proxy(socketserver.ThreadingTCPServer):
    """Tunnels every connection to the simulated Drive, which has a certificate for Google's names."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, target, certificate):
        super().__init__(("127.0.0.1", 0), Tunnel)
        host, _, port = target.rpartition("/")[2].partition(":")
        self.target = host, int(port)
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(certificate)
        self.asked = []

    def handle_error(self, request, client_address):
        """Ignore clients that disconnect."""


class Tunnel(socketserver.StreamRequestHandler):
    server: Proxy

    def handle(self):
        line, *headers = iter(lambda: self.rfile.readline().decode().strip(), "")
        self.server.asked.append(line)
        known = base64.b64encode(b"me:pass word").decode()
        if f"Proxy-Authorization: Basic {known}" not in headers:
            self.wfile.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            return
        self.wfile.write(b"HTTP/1.1 200 Connected\r\n\r\n")
        with (
            suppress(OSError),
            self.server.tls.wrap_socket(self.connection, server_side=True) as near,
            socket.create_connection(self.server.target) as far,
        ):
            back = threading.Thread(target=pump, args=(far, near), daemon=True)
            back.start()
            pump(near, far)
            back.join()


def pump(source, target):
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(server, tmp_path):
    certify(tmp_path / "google.pem", *GOOGLE)
    with Proxy(server.endpoint_url, tmp_path / "google.pem") as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


def use(proxy, user, monkeypatch):
    monkeypatch.setenv("https_proxy", f"http://{user}@127.0.0.1:{proxy.server_address[1]}")
    monkeypatch.setenv("no_proxy", "")


async def test_a_proxy_with_a_password_serves_tokens_listings_and_bytes(
    make, server, proxy, pem, folder, root, tmp_path, monkeypatch
):
    data = bytes(9 << 20)
    server.put(f"{folder}/big", data)
    server.require_token("none but those that it gives out")
    server.reset()
    use(proxy, "me:pass%20word", monkeypatch)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "google.pem"))
    robot = {"type": "service_account", "client_email": "robot@p.iam.gserviceaccount.com", "private_key": pem}
    robot["token_uri"] = f"https://{GOOGLE[1]}/token"
    origin = make(token=robot, endpoint_url=f"https://{GOOGLE[0]}")
    assert await names(origin.list(root)) == {(f"{root}/big", "file")}
    assert (await read(origin, f"{root}/big"))[0] == data
    await origin.call("pipe_file", f"{root}/written", b"abc")
    assert server.get(f"{folder}/written") == b"abc"
    assert {request.kind for request in server.requests} >= {"token", "get", "list", "media", "upload"}
    assert server.count("token") == 1
    assert {line.split()[0] for line in proxy.asked} == {"CONNECT"}
    assert {line.split()[1] for line in proxy.asked} == {f"{host}:443" for host in GOOGLE}


@pytest.mark.parametrize(
    ("password", "says"),
    [
        ("mistaken", "407 Proxy Authentication Required"),
        ("pass%20word", "1 try .*CERTIFICATE_VERIFY_FAILED.*SSL_CERT_FILE"),
    ],
)
async def test_a_proxy_that_refuses_or_is_not_trusted_is_an_error_that_says_so(
    make, server, proxy, monkeypatch, password, says
):
    use(proxy, f"me:{password}", monkeypatch)
    patient = RetryPolicy(base_s=0.001, cap_s=0.001, connect_s=30.0)
    origin = make(patient, endpoint_url=f"https://{GOOGLE[0]}")
    known = ObjectInfo("My Drive/a", size=1, fingerprint="f", id="1", details={"md5Checksum": "0"})
    for ask in (origin.lookup("My Drive/a"), read(origin, "My Drive/a", None, known)):
        with pytest.raises(OriginUnreachable, match=says) as caught:
            await ask
        assert "0x" not in str(caught.value)
        assert "mistaken" not in "".join(traceback.format_exception(caught.value))
    assert server.count() == 0


@pytest.mark.parametrize(
    "given",
    ["socks5://u:pw@proxy:1080", "proxy:1080", "http://proxy:x1080"],
)
async def test_a_proxy_that_is_not_http_is_an_error_before_anything_is_sent(make, monkeypatch, given):
    monkeypatch.setenv("HTTPS_PROXY", given)
    origin = make(endpoint_url="https://www.googleapis.invalid")
    with pytest.raises(
        ValueError, match=r"https_proxy.*only HTTP proxies are supported.*http://HOST:PORT"
    ) as caught:
        await origin.lookup("My Drive/a")
    assert "1080" not in str(caught.value)  # it may contain a password


@pytest.mark.parametrize(
    ("url", "no_proxy", "used"),
    [
        ("https://www.googleapis.com", "", True),
        ("https://www.googleapis.com", "localhost,.googleapis.com", False),
        ("https://www.googleapis.com", "*", False),
        ("http://127.0.0.1:4444", "", False),
        ("http://localhost:4444", "", False),
        ("http://10.0.0.1", "", True),
    ],
)
def test_local_addresses_and_no_proxy_are_connected_directly(monkeypatch, url, no_proxy, used):
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://proxy:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    assert (proxy_of(url) is not None) == used


def test_without_system_certificates_those_of_certifi_are_trusted(tmp_path, monkeypatch):
    (tmp_path / "none").mkdir()
    certify(tmp_path / "own.pem", "localhost")
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "own.pem"))
    assert len(tls_context().get_ca_certs()) < 2  # only this certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    assert len(tls_context().get_ca_certs()) > 50
