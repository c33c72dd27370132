"""Run a simulated cloud: `python -m cachedfs.sim gcs --profile table --folder DIR`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from cachedfs.sim.drive import DriveService
from cachedfs.sim.gcs import GCSService
from cachedfs.sim.network import PROFILES, Network, Profile
from cachedfs.sim.quota import QUOTAS
from cachedfs.sim.server import bound, new_loop, serve

_CLOUDS: dict[str, type[DriveService] | type[GCSService]] = {"drive": DriveService, "gcs": GCSService}


def main(
    argv: list[str] | None = None,
    *,
    before: Callable[[], object] = bool,
    program: str = "python -m cachedfs.sim",
) -> int:
    """Run a simulated cloud until SIGINT or SIGTERM, then return 0. The first line printed is its URL.

    `before` is called once the arguments are valid and the port is bound, before the URL is printed.
    """
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("cloud", choices=sorted(_CLOUDS))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--profile", default="off", help=f"one of {', '.join(PROFILES)}, or JSON")
    parser.add_argument("--quota", choices=QUOTAS, help="of drive: another than the profile's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-scale", type=float, default=1.0, help="divides all waits")
    parser.add_argument("--folder", type=Path, help="serve DIR/BUCKET/KEY; of drive, DIR is My Drive")
    parser.add_argument("--bucket", action="append", default=[], help="of gcs: make it; repeatable")
    parser.add_argument("--watch-stdin", action="store_true", help="end when stdin is closed")
    options = parser.parse_args(argv)
    try:
        profile = Profile.resolve(options.profile)
        if options.quota:
            profile = dataclasses.replace(profile, quota=QUOTAS[options.quota])
    except ValueError as error:
        parser.error(str(error))
    service = _CLOUDS[options.cloud](Network(profile, options.seed, options.time_scale), options.folder)
    for bucket in options.bucket:
        if not isinstance(service, GCSService):
            parser.error("--bucket is of gcs")
        service.do_make_bucket(bucket)
    sock = bound(options.host, options.port)
    sock.listen()
    before()

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def end_with_stdin() -> None:
            if not os.read(0, 4096):
                stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        if options.watch_stdin:
            loop.add_reader(0, end_with_stdin)
        print(f"http://{options.host}:{sock.getsockname()[1]}", flush=True)
        await serve(service, sock, stop)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
