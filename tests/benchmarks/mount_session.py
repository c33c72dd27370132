"""Record a terminal session of a mount, over a simulated Google Cloud Storage, as a picture.

    python -m tests.benchmarks.mount_session docs/mount.svg

A temporary folder is shown as ~, and the folder `mnt` in it as /mnt. Linux only, with FUSE.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from cachedfs.sim import Delay, GCSServer, Profile

SESSION = [
    "cachedfs mount --daemon gs://my-bucket/data /mnt/data",
    "ls -l /mnt/data",
    "time md5sum /mnt/data/train.tar  # from the bucket",
    "time md5sum /mnt/data/train.tar  # from the cache",
    "cachedfs ls -l gs://my-bucket/data",
    "cachedfs unmount /mnt/data",
]
SIZES = {"labels.csv": 40_000, "test.tar": 20_000_000, "train.tar": 100_000_000}
LINK = Profile(media=Delay(0.045), metadata=Delay(0.045), listing=Delay(0.06), total_rate=40e6)
WIDTH = 72


def main() -> int:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    with tempfile.TemporaryDirectory() as home, GCSServer(LINK, process=True) as server:
        server.make_bucket("my-bucket")
        for name, size in SIZES.items():
            server.put("my-bucket", f"data/{name}", os.urandom(size))
        os.makedirs(mounted := f"{home}/mnt/data")
        environment = {
            **os.environ, "FSSPEC_GS_TOKEN": "anon", "FSSPEC_GS_ENDPOINT_URL": server.endpoint_url, "HOME": home,
            "SHELL": "/bin/bash", "TIMEFORMAT": "real %3lR", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        try:
            for command in SESSION:
                real = command.replace("/mnt", f"{home}/mnt")
                in_terminal = ["script", "--quiet", "--return", "--command", real, os.devnull]
                done = subprocess.run(
                    in_terminal, env=environment, check=True, capture_output=True, text=True
                )
                printed = done.stdout.replace(f"{home}/mnt", "/mnt").replace(home, "~")
                printed = printed.replace(home.replace("/", "-"), "").rstrip()  # in the name of the log
                console.print(Text.assemble(("$ ", "green"), (command, "bold")))
                console.print(Text.from_ansi(printed), end="\n" if command == SESSION[-1] else "\n\n")
        finally:
            if os.path.ismount(mounted):
                subprocess.run(["fusermount3", "-u", "-z", mounted], check=True)
    picture = console.export_svg(title="cachedfs mount")
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # fonts from another site
    Path(sys.argv[1]).write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
