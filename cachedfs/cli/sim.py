"""The commands `sim` and `demo`: run a simulated cloud, and compare cachedfs with direct reads on it."""

from __future__ import annotations

import os
import socket
from typing import Annotated

import typer

from cachedfs.cli.arguments import CommonOptions, argument, command, option

MORE = "Others go to python -m cachedfs.sim: --seed 1, --bucket NAME."
PROFILE = "Latency profile: off, table, gcs-region, drive-typical..."
PORTS = {"gcs": 4443, "drive": 4444}


@command(
    "cachedfs sim gcs --profile table",
    "cachedfs sim gcs --folder /data --port 4443",
    "cachedfs sim drive --profile drive-typical",
    common=("debug",),
    ignore_unknown_options=True,
)
def sim(
    common: CommonOptions,
    cloud: Annotated[str, argument("gcs|drive", "Which cloud.")],
    more: Annotated[list[str] | None, argument("OPTION", MORE)] = None,
    profile: Annotated[str, option("NAME", PROFILE, default=True)] = "off",
    port: Annotated[int | None, option("N", "0 takes a free one.", default="4443, for Drive 4444")] = None,
    folder: Annotated[str | None, option("DIR", "Serve the files below DIR, not memory.")] = None,
) -> None:
    """Run a simulated cloud on this machine until Ctrl-C."""
    from cachedfs.sim.__main__ import main as run

    if folder is not None and not os.path.isdir(folder):
        raise typer.BadParameter(f"there is no folder {folder}", param_hint="--folder")
    port = usable_port(PORTS.get(cloud, 0) if port is None else port)
    arguments = [cloud, "--port", str(port), "--profile", profile, *(more or ())]
    if folder is not None:
        arguments += ["--folder", folder]
    elif cloud == "gcs" and "--bucket" not in arguments:
        arguments += ["--bucket", "my-bucket"]
    section, url = ("DRIVE", '"drive://My Drive"') if cloud == "drive" else ("GS", "gs://")
    lines = [
        "A simulated cloud; Ctrl-C ends it. In another terminal:",
        f"  export FSSPEC_{section}_TOKEN=anon",
        f"  export FSSPEC_{section}_ENDPOINT_URL=http://127.0.0.1:{port}",
        *(["  export GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT=false  # for plain gcsfs"] if cloud == "gcs" else []),
        f"  cachedfs ls -l {url}",
    ]
    raise typer.Exit(
        run(arguments, before=lambda: typer.echo("\n".join(lines), err=True), program="cachedfs sim")
    )


def usable_port(port: int) -> int:
    """Return the port, or a free one for 0. Raises OSError if the port is taken."""
    try:
        with socket.create_server(("127.0.0.1", port)) as sock:
            return int(sock.getsockname()[1])
    except OSError as error:
        raise OSError(f"port {port}: {os.strerror(error.errno or 0)}; --port 0 takes a free one") from error


@command("cachedfs demo", common=("debug",))
def demo(common: CommonOptions) -> None:
    """Measure cachedfs against a simulated cloud.

    Reads real data with cachedfs and without, and prints one table. Takes
    about a minute.
    """
    from cachedfs.demo.comparison import main as run

    raise typer.Exit(run())
