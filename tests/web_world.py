"""A web server whose answers a test changes."""

import functools
import gzip
import http.server
import itertools
import threading
from email.utils import formatdate
from urllib.parse import unquote

OLD_S = 1_700_000_000  # the time of the first object


class World:
    """What a server has; `change` edits each answer before it is sent."""

    def __init__(self, handler):
        self.change = lambda answer: None
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, self))
        self._server.handle_error = lambda *_: None  # a reader may close its connection at any time
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class WebWorld(World):
    """Objects below `root`, served with ETags and ranges.

    `log` has the method, the path and the Range of each request, and `asked` its headers.
    """

    def __init__(self):
        self.objects = {}
        self.log = []
        self.asked = []
        self._versions = itertools.count()
        super().__init__(_Handler)
        self.root = f"{self.url}/root"

    def put(self, name, data):
        self.store(f"/root/{name}", data)
        return f"{self.root}/{name}"

    def store(self, path, data):
        version = next(self._versions)
        self.objects[path] = (bytes(data), f'"v{version}"', formatdate(OLD_S + version, usegmt=True))

    def get(self, name):
        return self.objects[f"/root/{name}"][0]

    def delete(self, name):
        del self.objects[f"/root/{name}"]

    def ranges(self):
        """Return the ranges that were requested since the last call."""
        ranges, self.log = [range_ for _, _, range_ in self.log], []
        return ranges


class Answer:
    """An answer before it is sent. `data` is the whole object, `body` what is sent of it."""

    def __init__(self, status, headers, data, body, request):
        self.status, self.headers, self.data, self.body = status, headers, data, body
        self.request = request  # its headers
        self.is_chunked = False

    def of(self, start, stop):
        """Make this an answer to a range."""
        self.status, self.body = 206, self.data[start:stop]
        self.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(self.data)}"

    def whole(self):
        """Make this the answer of a server without ranges."""
        self.status, self.body = 200, self.data
        self.headers.pop("Content-Range", None)

    def chunked(self):
        """Do not state the length of the body."""
        self.is_chunked = True

    def encoded(self):
        """Make this an answer of a server that always compresses: ranges are parts of the compressed bytes."""
        self.data = gzip.compress(self.data, mtime=0)
        self.headers["Content-Encoding"] = "gzip"
        self.serve()

    def serve(self):
        """Answer the Range of the request, from the current data."""
        self.whole()
        if not (asked := self.request["Range"]):
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        size = len(self.data)
        start = int(first) if first else max(size - int(last), 0)
        stop = min(int(last) + 1, size) if first and last else size
        if start >= size:
            self.status, self.body = 416, b""
            self.headers["Content-Range"] = f"bytes */{size}"
        else:
            self.of(start, stop)


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends answers of a world."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is sent in one piece

    def __init__(self, world, *args):
        self.world = world
        super().__init__(*args)

    def log_message(self, *args):
        pass

    def send(self, answer):
        body = answer.body
        headers = (
            answer.headers if "Date" in answer.headers else {"Date": self.date_time_string()} | answer.headers
        )
        self.send_response_only(answer.status)
        if answer.is_chunked:
            headers["Transfer-Encoding"] = "chunked"
            body = (b"%x\r\n%s\r\n" % (len(body), body) if body else b"") + b"0\r\n\r\n"
        else:
            headers.setdefault("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(body)
            except OSError:  # a reader that wanted the headers only
                self.close_connection = True
        if len(answer.body) < int(headers.get("Content-Length", 0)):
            self.close_connection = True


class _Handler(Handler):
    def do_GET(self):
        self.world.log.append((self.command, self.path, self.headers["Range"]))
        self.world.asked.append(self.headers)
        path = unquote(self.path.partition("?")[0])
        if path in self.world.objects:
            data, etag, modified = self.world.objects[path]
            headers = {"ETag": etag, "Last-Modified": modified, "Content-Type": "application/x"}
        elif links := self._links(path.rstrip("/") + "/"):
            modified = formatdate(OLD_S, usegmt=True)
            data, headers = links, {"Content-Type": "text/html", "Last-Modified": modified}
        else:
            data, headers = b"nothing here", {}
        answer = Answer(200, headers, data, data, self.headers)
        if headers:
            answer.serve()
        else:
            answer.status = 404
        self.world.change(answer)
        self.send(answer)

    do_HEAD = do_GET

    def do_PUT(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.world.store(unquote(self.path), data)
        self.send(Answer(200, {}, b"", b"", self.headers))

    def _links(self, folder):
        below = (path[len(folder) :] for path in self.world.objects if path.startswith(folder))
        names = {name.partition("/")[0] + name.partition("/")[1] for name in below}
        return "".join(f'<a href="{name}">x</a>' for name in sorted(names)).encode()
