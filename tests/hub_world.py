"""A stand-in of the Hugging Face Hub with one dataset, as its public API documentation describes it.

Small files are sent by the Hub itself. Large ones, those that end in `.bin`, are sent by another host, after a redirect
that states their hash.
"""

import base64
import hashlib
import json
from urllib.parse import parse_qs, unquote, urlsplit

from tests.web_world import Answer, Handler, World

ID = "me/data"
API = f"/api/datasets/{ID}/"
PAGE = f"/datasets/{ID}/resolve/"
ABSENT = {
    "EntryNotFound": "Entry not found",
    "RevisionNotFound": "Invalid rev id",
    "RepoNotFound": "Repository not found",
}


class HubWorld(World):
    """Files of a dataset in commits; `asked` has the kind of each request, as the limits of the Hub count them."""

    root = f"datasets/{ID}"

    def __init__(self):
        self.commits = {"0" * 40: {}}
        self.asked = []
        self.tokens = []
        super().__init__(_Handler)
        self.endpoint = self.url

    @property
    def head(self):
        return [*self.commits][-1]

    def commit(self, **changes):
        """Change files, None to remove one, with one commit; return the commit."""
        files = {**self.commits[self.head], **changes}
        name = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[name] = {path: data for path, data in files.items() if data is not None}
        return name

    def put(self, name, data):
        self.commit(**{name: bytes(data)})
        return f"{self.root}/{name}"

    def get(self, name):
        return self.commits[self.head][name]

    def delete(self, name):
        self.commit(**{name: None})

    def counts(self):
        """Return how many requests of each kind there were since the last call."""
        kinds, self.asked = self.asked, []
        return {kind: kinds.count(kind) for kind in sorted({*kinds})}


def blob(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def described(path, data):
    """Return a file as listings show it."""
    if not path.endswith(".bin"):
        return {"type": "file", "path": path, "size": len(data), "oid": blob(data)}
    sha = hashlib.sha256(data).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {len(data)}\n".encode()
    lfs = {"oid": sha, "size": len(data), "pointerSize": len(pointer)}
    xet = hashlib.blake2b(data, digest_size=32).hexdigest()
    return {"type": "file", "path": path, "size": len(data), "oid": blob(pointer), "lfs": lfs, "xetHash": xet}


def tree(files, folder, deep):
    """Return what is in a folder, files and folders, as listings show it; None for no folder."""
    prefix = f"{folder}/" if folder else ""
    below = {path: data for path, data in files.items() if path.startswith(prefix)}
    if folder and not below:
        return None
    folders = {
        prefix + "/".join(parts[:n])
        for parts in (path[len(prefix) :].split("/") for path in below)
        for n in range(1, len(parts))
    }
    found = [described(path, data) for path, data in below.items()]
    found += [{"type": "directory", "path": path, "size": 0, "oid": "f" * 40} for path in folders]
    return [
        each
        for each in sorted(found, key=lambda each: each["path"])
        if deep or "/" not in each["path"][len(prefix) :]
    ]


class _Handler(Handler):
    def do_GET(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        url = urlsplit(self.path)
        is_page = "/resolve/" in url.path
        kind = "bytes" if url.path.startswith("/cdn/") else "resolve" if is_page else "api"
        self.world.asked.append(kind)
        self.world.tokens.append((kind, self.headers["Authorization"]))
        if kind == "bytes":
            answer = self._bytes(self._found(url.path.removeprefix("/cdn/")), {"ETag": '"of the storage"'})
        elif is_page and url.path.startswith(PAGE):
            answer = self._resolved(*url.path.removeprefix(PAGE).split("/", 1))
        elif f"{url.path}/".startswith(API):
            answer = self._api(*f"{url.path}///".removeprefix(API).split("/", 2), parse_qs(url.query), body)
        else:
            answer = self._absent("RepoNotFound")
        self.world.change(answer)
        self.send(answer)

    do_HEAD = do_POST = do_GET

    def _commit(self, revision):
        name = self.world.head if unquote(revision) in ("main", "refs/pr/1") else unquote(revision)
        return name if name in self.world.commits else None

    def _found(self, sha):
        contents = [data for files in self.world.commits.values() for data in files.values()]
        return next(data for data in contents if hashlib.sha256(data).hexdigest() == sha)

    def _resolved(self, revision, name):
        if (commit := self._commit(revision)) is None:
            return self._absent("RevisionNotFound")
        if (data := self.world.commits[commit].get(path := unquote(name))) is None:
            return self._absent("EntryNotFound")
        known = described(path, data)
        headers = {"X-Repo-Commit": commit}
        if "lfs" not in known:
            return self._bytes(data, {**headers, "ETag": f'"{known["oid"]}"'})
        sha = known["lfs"]["oid"]
        headers |= {
            "X-Linked-ETag": f'"{sha}"',
            "X-Linked-Size": str(len(data)),
            "X-Xet-Hash": known["xetHash"],
        }
        headers["Location"] = f"http://localhost:{self.world.port}/cdn/{sha}"  # another host than 127.0.0.1
        return self._answer(b"", headers, 302)

    def _answer(self, data, headers, status=200):
        return Answer(status, headers, data, data, self.headers)

    def _absent(self, code):
        return self._answer(b"", {"X-Error-Code": code, "X-Error-Message": ABSENT[code]}, 404)

    def _bytes(self, data, headers):
        answer = self._answer(data, headers)
        answer.serve()
        return answer

    def _api(self, method, revision, rest, query, body):
        commit, name = self._commit(revision or "main"), unquote(rest.strip("/"))
        if commit is None:
            return self._absent("RevisionNotFound")
        files = self.world.commits[commit]
        if method == "tree":
            found = tree(files, name, query.get("recursive", [""])[0].lower() in ("true", "1"))
        elif method == "paths-info":
            given = json.loads(body) if body[:1] == b"{" else parse_qs(body.decode())
            entries = {each["path"]: each for each in tree(files, "", True)}
            found = [entries[path] for path in given["paths"] if path in entries]
        elif method == "preupload":
            paths = [each["path"] for each in json.loads(body)["files"]]
            found = {
                "files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
            }
        elif method == "commit":
            steps = [json.loads(line) for line in body.splitlines()]
            written = {
                each["value"]["path"]: base64.b64decode(each["value"].get("content", ""))
                for each in steps[1:]
            }
            removed = {each["value"]["path"]: None for each in steps if each["key"] == "deletedFile"}
            oid = self.world.commit(**{**written, **removed})
            found = {"commitUrl": f"{self.world.endpoint}/datasets/{ID}/commit/{oid}", "commitOid": oid}
        else:
            found = {"id": ID, "sha": commit, "private": False, "tags": [], "siblings": []}
        if found is None:
            return self._absent("EntryNotFound")
        return self._answer(json.dumps(found).encode(), {"Content-Type": "application/json"})
