"""Sign-in in Colab: renewal of an expired token, with concurrent requests and in a worker process."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse

import pytest

from tests.support import ROOT

ACCOUNTS = "/computeMetadata/v1/instance/service-accounts/"

# The module that Colab machines have; it ends in requests to the metadata server of the machine.
COLAB = """
import os, urllib.request

def authenticate_user(clear_output=True, project_id=None):
    urllib.request.urlopen(f"http://{os.environ['GCE_METADATA_HOST']}/user-said-yes", data=b"").close()
"""

# A notebook: sign-in, an epoch in which the token expires, and a worker process.
NOTEBOOK = """
import json, multiprocessing, os, sys, threading, urllib.request
import fsspec

def control(what):
    urllib.request.urlopen(f"http://{os.environ['GCE_METADATA_HOST']}/{what}", data=b"").close()

def worker(fs, name, out):
    out.send(fs.cat_file(name).decode())

if __name__ == "__main__":
    drive = {"endpoint_url": sys.argv[1]}
    fs = fsspec.filesystem("cachedfs", target_protocol="drive", cache_dir=sys.argv[2], drive=drive)
    said = []
    try:
        fs.ls("My Drive")
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")

    from google.colab import auth
    auth.authenticate_user()

    names = fs.find("My Drive/epoch")
    assert len(fs.cat(names[:32])) == 32
    control("an-hour-passes")
    asking = [threading.Thread(target=fs.info, args=(f"My Drive/other/f{i:06d}",)) for i in range(8)]
    for thread in asking:
        thread.start()
    found = fs.cat(names[32:])
    for thread in asking:
        thread.join()
    control("workers")
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(fs, "My Drive/other/f000000", theirs))
    process.start()
    in_worker = mine.recv()
    process.join()
    contents = {name.rpartition("/")[2]: data.decode() for name, data in found.items()}
    print(json.dumps({"said": said, "found": contents, "worker": in_worker}))
"""


class Metadata(http.server.ThreadingHTTPServer):
    """The metadata server of a Colab machine: it has no token before the user consents, and then one for an hour."""

    daemon_threads = True

    def __init__(self, drive):
        super().__init__(("127.0.0.1", 0), Answers)
        self.drive, self.lock = drive, threading.Lock()
        self.signed_in, self.token, self.n_tokens = False, "", 0
        self.asked = {}  # how often a token was requested, in each part of the notebook
        self.part = "before"

    def new_part(self, part):
        self.part = part
        if part == "user-said-yes":
            self.signed_in = True
        elif part == "an-hour-passes":
            self.token = ""
            self.drive.require_token("none")

    def answer(self, path):
        if path == "/":
            return ""
        if not self.signed_in:
            self.asked[self.part] = self.asked.get(self.part, 0) + path.endswith("/token")
            return None
        if path in (ACCOUNTS + "default/token", ACCOUNTS + "me@example.com/token"):
            self.asked[self.part] = self.asked.get(self.part, 0) + 1
            if not self.token:
                self.n_tokens += 1
                self.token = f"ya29.colab-{self.n_tokens}"
                self.drive.require_token(self.token)
            return {"access_token": self.token, "expires_in": 3599, "token_type": "Bearer"}
        if path in (ACCOUNTS + "default/", ACCOUNTS + "me@example.com/"):
            return {"email": "me@example.com", "scopes": ["https://www.googleapis.com/auth/drive"]}
        return None


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Metadata

    def log_message(self, *_): ...

    def do_POST(self):
        with self.server.lock:
            self.server.new_part(self.path.strip("/"))
        self.reply(200, "")

    def do_GET(self):
        with self.server.lock:
            value = self.server.answer(urllib.parse.urlsplit(self.path).path)
        self.reply(404 if value is None else 200, value)

    def reply(self, status, value):
        body = b"" if not value else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def metadata(server):
    with Metadata(server) as metadata:
        thread = threading.Thread(target=metadata.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield metadata
        metadata.shutdown()
        thread.join()


def in_colab(tmp_path, metadata, endpoint_url):
    """Return the output of the notebook, run as a new process without any credentials."""
    module = tmp_path / "colab" / "google" / "colab"
    module.mkdir(parents=True)
    (module / "__init__.py").touch()
    (module / "auth.py").write_text(COLAB)
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    out = ("GOOGLE_APPLICATION_CREDENTIALS", "NO_GCE_CHECK")
    kept = {
        name: text for name, text in os.environ.items() if "proxy" not in name.lower() and name not in out
    }
    host = f"127.0.0.1:{metadata.server_address[1]}"
    machine = {
        "GCE_METADATA_HOST": host,
        "GCE_METADATA_IP": host,
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
    }
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "notebook.py"), endpoint_url, str(tmp_path / "cache")],
        env={**kept, **machine, "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path / 'colab'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


def test_authenticate_user_of_colab_lasts_longer_than_its_token(server, metadata, tmp_path):
    server.fill(server.folder("epoch"), 64)
    server.fill(server.folder("other"), 8)
    server.require_token("none")
    seen = in_colab(tmp_path, metadata, server.endpoint_url)
    (said,) = seen["said"]
    assert said.startswith("SignInRefused: ")
    assert "auth.authenticate_user()" in said
    assert seen["found"] == {f"f{i:06d}": f"f{i:06d}\nf{i:06d}\n"[:16] for i in range(32, 64)}
    assert seen["worker"] == "f000000\nf000000\n"
    # One token after the consent, and one when it had expired, whichever caller found that; a worker gets its own.
    assert {part: n for part, n in metadata.asked.items() if part != "before"} == {
        "user-said-yes": 1,
        "an-hour-passes": 1,
        "workers": 1,
    }
    assert metadata.n_tokens == 2
