"""A simulated S3: what moto answers, behind the log and the faults of our simulated clouds."""

from urllib.parse import unquote

from moto.moto_server.werkzeug_app import create_backend_app
from moto.s3.models import s3_backends
from werkzeug.test import Client

from cachedfs.sim.messages import Call, Response, Route
from cachedfs.sim.network import Network
from cachedfs.sim.server import SimServer, command
from cachedfs.sim.service import Service

_KINDS = {"PUT": "upload", "POST": "upload", "HEAD": "metadata", "DELETE": "delete"}
_SET_BY_US = {"connection", "content-length", "host", "transfer-encoding"}
_BACKEND = s3_backends["123456789012"]["aws"]  # moto's account; shared by all servers of a process


class S3Service(Service):
    """Passes requests to moto."""

    def __init__(self, network: Network, folder: object) -> None:
        super().__init__(network)
        self._moto = Client(create_backend_app("s3"))

    def route(self, call: Call) -> Route:
        bucket, _, key = unquote(call.path).lstrip("/").partition("/")
        kind = _KINDS.get(call.method) or ("media" if key else "list")
        return Route(kind, self._ask_moto, bucket, key)

    def _ask_moto(self, call: Call) -> Response:
        headers = {name: value for name, value in call.headers.items() if name not in _SET_BY_US}
        answer = self._moto.open(
            call.path, method=call.method, query_string=call.query, headers=headers, data=call.body
        )
        size = int(answer.headers.get("Content-Length", 0))
        body = bytes(size) if call.method == "HEAD" else answer.get_data()
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _SET_BY_US}
        return Response(answer.status_code, headers, body)

    def do_make_bucket(self, bucket: str, versioned: bool = False) -> None:
        if bucket in _BACKEND.buckets:  # of another server of this process
            _BACKEND.buckets[bucket].keys.clear()
        else:
            _BACKEND.create_bucket(bucket, "us-east-1")
        if versioned:
            _BACKEND.put_bucket_versioning(bucket, "Enabled")

    def do_put(self, bucket: str, key: str, data: bytes) -> None:
        _BACKEND.put_object(bucket, key, data)

    def do_get(self, bucket: str, key: str) -> bytes:
        return _BACKEND.get_object(bucket, key).value

    def do_delete(self, bucket: str, key: str) -> None:
        _BACKEND.delete_object(bucket, key)


class S3Server(SimServer):
    """A simulated S3 in a thread of this process."""

    service = S3Service
    make_bucket = command(S3Service.do_make_bucket)
    put = command(S3Service.do_put)
    get = command(S3Service.do_get)
    delete = command(S3Service.do_delete)
