"""An endpoint in a thread of the test process, and plain and signed requests to it."""

import asyncio
import contextlib
import http.client
import socket
import threading
from base64 import b64encode
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, urlencode

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from cachedfs.server.access import AccessRules
from cachedfs.server.bucket import Bucket
from cachedfs.server.endpoint import Endpoint
from cachedfs.server.signatures import Keys
from cachedfs.server.worker import http_server

KEYS = Keys("CACHEDFSTEST", "secret")


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """S3's code of an error."""
        return self.body.decode().partition("<Code>")[2].partition("</Code>")[0]


class Served:
    """An endpoint on a port of its own, until `close`."""

    def __init__(self, buckets, *, keys=KEYS, domains=("localhost",), origins=()):
        self.endpoint = Endpoint(
            {name: Bucket(fs, root) for name, (fs, root) in buckets.items()},
            AccessRules(keys, domains, origins),
            domains,
        )
        sock = socket.create_server(("127.0.0.1", 0))
        self.port = sock.getsockname()[1]
        self.host, self.url = f"127.0.0.1:{self.port}", f"http://127.0.0.1:{self.port}"
        self._loop, self._stop, is_ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

        async def run():
            server = http_server(self.endpoint)
            listening = await self._loop.create_server(server, sock=sock)
            is_ready.set()
            await self._stop.wait()
            listening.close()
            await server.shutdown(1.0)

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[run()])
        self._thread.start()
        is_ready.wait()

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def ask(self, method, target, headers=None, *, body=None, signed=True):
        """Send a request for a raw target; return the whole answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            headers = dict(headers or {})
            connection.request(
                method, target, body, self.sign(method, target, headers) if signed else headers
            )
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()

    def get(self, target, headers=None, **options):
        return self.ask("GET", target, headers, **options)

    def sign(self, method, target, headers, keys=KEYS):
        """Return the headers with the signature of botocore."""
        path, mark, query = target.partition("?")
        encoded = urlencode(parse_qsl(query, keep_blank_values=True), quote_via=quote, safe="")
        url = f"http://{headers.get('Host', self.host)}{path}{mark}{encoded}"
        request = AWSRequest(method, url, headers)
        S3SigV4Auth(Credentials(*keys), "s3", "eu-west-1").add_auth(request)
        return dict(request.headers)

    def signed_bytes(self, method, target, *lines):
        """Return a signed request as it is sent, with more lines in its head."""
        headers = self.sign(method, target, {"Host": self.host})
        head = [
            f"{method} {target} HTTP/1.1",
            *lines,
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "".join(f"{line}\r\n" for line in [*head, ""]).encode()

    def raw(self, sent):
        """Send bytes, and return all that comes until the endpoint ends the connection, however it does."""
        found = b""
        with (
            socket.create_connection(("127.0.0.1", self.port)) as sock,
            contextlib.suppress(ConnectionResetError),
        ):
            sock.sendall(sent)
            while data := sock.recv(1 << 20):
                found += data
        return found


def basic(text):
    """Return the header with a user and a password, as `user:password`."""
    return {"Authorization": f"Basic {b64encode(text.encode()).decode()}"}


def boto3_client(url, access_key, secret_key):
    """Return boto3's client, as its user makes it."""
    keys = {"aws_access_key_id": access_key, "aws_secret_access_key": secret_key}
    return pytest.importorskip("boto3").client("s3", endpoint_url=url, region_name="us-east-1", **keys)


def target(bucket, key=""):
    """Return the raw path of an object."""
    return f"/{bucket}/{quote(key)}"
