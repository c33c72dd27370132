"""Run with a few extras installed: a program and the command line read the simulated cloud."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec

import cachedfs
from cachedfs.sim import GCSServer

DATA = bytes(range(256)) * 8192  # 2 MiB
with tempfile.TemporaryDirectory() as folder, GCSServer(profile="off") as server:
    server.make_bucket("b")
    server.put("b", "key", DATA)
    os.environ |= {
        "FSSPEC_GS_TOKEN": "anon",
        "FSSPEC_GS_ENDPOINT_URL": server.endpoint_url,
        "FSSPEC_CACHEDFS_CACHE_DIR": f"{folder}/cache",
        "FSSPEC_CACHEDFS_KEEP_FREE": "0",
    }
    fsspec.config.set_conf_env(fsspec.config.conf)
    for _ in range(2):
        with fsspec.open("cachedfs::gs://b/key") as file:
            assert file.read() == DATA
    stats = fsspec.filesystem("cachedfs", target_protocol="gs").stats()
    assert (stats.requests, stats.misses, stats.hits) == (1, 2, 2), stats

    def command(*arguments: str) -> str:
        script = Path(sys.executable).parent / "cachedfs"
        done = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert command("--version") == f"cachedfs {importlib.metadata.version('cachedfs')}\n"
    before = server.count(kind="media")
    command("get", "gs://b/key", f"{folder}/copy")
    assert Path(folder, "copy").read_bytes() == DATA
    assert server.count(kind="media") == before, "what the program read was not cached for the command line"
    assert json.loads(command("stats", "--json"))["blocks"] == 2
assert cachedfs.__version__ == importlib.metadata.version("cachedfs")
print("a program and the command line have read the simulated cloud")
