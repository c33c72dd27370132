"""A simulated S3: the in-memory S3 of moto behind our server, for its request log and its faults."""

from urllib.parse import unquote

from moto.backends import get_backend
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.test import Client

from cachedfs.sim.messages import Call, Refusal, Response, Route
from cachedfs.sim.objects import DataBody
from cachedfs.sim.server import SimServer
from cachedfs.sim.service import Service

SECRET = {"key": "test", "secret": "test"}
_OF_ONE_HOP = {"transfer-encoding", "connection", "content-length", "host"}


class S3Service(Service):
    """Logs, delays and spoils what moto answers."""

    def __init__(self, network, folder=None):
        super().__init__(network)
        self._moto = Client(DomainDispatcherApplication(create_backend_app, service="s3"))

    def route(self, call: Call) -> Route:
        bucket, _, key = unquote(call.path).lstrip("/").partition("/")
        if call.method in ("PUT", "POST"):
            kind = "upload"
        elif call.method == "HEAD":
            kind = "metadata"
        elif call.method == "GET":
            kind = "media" if key else "list"
        else:
            kind = "other"
        return Route(kind, self._ask, bucket, key, style="xml")

    def _ask(self, call: Call) -> Response:
        headers = {name: value for name, value in call.headers.items() if name not in _OF_ONE_HOP}
        answer = self._moto.open(
            call.path, method=call.method, query_string=call.query, headers=headers, data=call.body
        )
        body = answer.get_data()
        if call.method == "HEAD":
            body = bytes(int(answer.headers.get("Content-Length", 0)))
        found = {name: value for name, value in answer.headers if name.lower() not in _OF_ONE_HOP}
        return Response(answer.status_code, found, DataBody(body))
