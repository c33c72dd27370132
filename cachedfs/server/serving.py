"""`serve`: a read-only S3 endpoint in processes of its own, which end with the process that started them."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import re
import secrets
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Any, Self

import fsspec.config

from cachedfs.common.urls import cached_url, protocols_of

logger = logging.getLogger("cachedfs.server")

ENDS_WITHIN_S = 15.0  # a worker, before it is killed
REGION = "us-east-1"
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class S3Address:
    """The address of an endpoint, and the keys of its clients; an anonymous one accepts any keys."""

    def __init__(self, url: str, access_key: str | None, secret_key: str | None) -> None:
        #: The address of the endpoint, such as `http://127.0.0.1:9000`.
        self.url = url
        self.access_key, self.secret_key = access_key or "anonymous", secret_key or "anonymous"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which S3 clients find the endpoint."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def storage_options(self) -> dict[str, str]:
        """The same as `storage_options` of polars, deltalake, Lance and other readers written in Rust."""
        return {name.lower(): value for name, value in self.environment.items() if "DEFAULT" not in name}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"


class S3Server(S3Address):
    """A running endpoint, until `close` or the end of a `with` block."""

    def __init__(
        self, settings: Mapping[str, Any], scheme: str, host: str, sockets: Sequence[socket.socket]
    ) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        port = sockets[0].getsockname()[1]
        super().__init__(
            f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}", *(settings["keys"] or ("", ""))
        )
        try:
            for sock in sockets:
                self._processes.append(_start({**settings, "fd": sock.fileno()}, sock))
            for process in self._processes:
                _wait_until_ready(process)
        except BaseException:  # also Ctrl-C: no worker stays behind
            self.close()
            raise
        finally:
            for sock in sockets:
                sock.close()

    def wait(self) -> None:
        """Wait until a worker ends. Raises OSError if it failed."""
        by_pipe = {process.stdout: process for process in self._processes if process.stdout is not None}
        ended, _, _ = select.select([*by_pipe], [], [])
        code = by_pipe[ended[0]].wait()
        if code:
            raise OSError(f"a process of the endpoint ended with status {code}")

    def terminate(self) -> None:
        """Tell the workers to end once the answers of the moment are sent. From a signal handler too."""
        for process in self._processes:
            process.terminate()

    def close(self) -> None:
        """End the workers. Has no effect if they have ended."""
        self.terminate()
        for process in self._processes:
            with process:  # closes its pipes
                try:
                    process.wait(ENDS_WITHIN_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as when the interpreter ends
            self.close()


def serve(
    buckets: Mapping[str, str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    workers: int = 1,
    access_key: str | None = None,
    secret_key: str | None = None,
    anonymous: bool = False,
    domains: Sequence[str] = (),
    allow_origins: Sequence[str] = (),
    tls_cert: str | None = None,
    tls_key: str | None = None,
    **options: Any,
) -> S3Server:
    """Serve URLs as buckets of a read-only S3 endpoint, through the cache, for readers that take no fsspec URL.

        with cachedfs.serve({"data": "gs://bucket/prefix"}) as server:
            frame = pl.scan_parquet("s3://data/x.parquet", storage_options=server.storage_options).collect()

    `options` are those of `CachedFileSystem`, such as `max_age=0` or `gs={"token": "anon"}`. It runs in `workers`
    processes of their own, which end with this one. `port` 0 takes a free one. Keys are generated unless given.
    `domains` are names under which clients reach it, beside addresses and `localhost`; `allow_origins` are origins of
    pages whose scripts may read, such as `https://example.com`.

    Raises ValueError for options that contradict each other, and OSError if the port is taken.
    """
    is_local = host == "localhost" or _is_loopback(host)
    if (access_key is None) != (secret_key is None) or (tls_cert is None) != (tls_key is None):
        raise ValueError(
            "serve: give both access_key and secret_key, or neither; and both tls_cert and tls_key"
        )
    if anonymous and not is_local:
        raise ValueError(f"serve: anonymous is for this machine only, and others reach {host}")
    for name in buckets:
        if not _NAME.fullmatch(name):
            raise ValueError(f"serve: {name!r} is no name of a bucket: 3 to 63 of a-z, 0-9, '.' and '-'")
    if anonymous:
        logger.warning("every user of this machine can read what is served")
    if not is_local and tls_cert is None:
        logger.warning("others reach %s without encryption: tls_cert and tls_key add it", host)
    settings = {
        "buckets": {name: _located(url, options) for name, url in buckets.items()},
        "conf": fsspec.config.conf,
        "keys": None if anonymous else [access_key, secret_key] if access_key else new_keys(),
        "domains": list(dict.fromkeys(["localhost", host, *domains])),
        "origins": list(allow_origins),
        "tls": tls_cert and (tls_cert, tls_key),
        "log_level": logger.getEffectiveLevel(),
    }
    scheme = "http" if tls_cert is None else "https"
    return S3Server(settings, scheme, host, _listening(host, port, workers))


def new_keys() -> tuple[str, str]:
    """Return a new access key and secret key, of letters that a URL may have."""
    return f"CACHEDFS{secrets.token_hex(6).upper()}", secrets.token_hex(20)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _located(url: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the URL with the cache in front, and those of the options that are for it."""
    url = cached_url(url)
    protocol = url.rpartition("::")[2].partition("://")[0]
    names = {"cachedfs", *protocols_of(protocol)} | {"cgs": {"gs", "gcs"}, "cdrive": {"drive"}}.get(
        protocol, set()
    )
    return url, {
        name: value for name, value in options.items() if name in names or not isinstance(value, Mapping)
    }


def _listening(host: str, port: int, workers: int) -> list[socket.socket]:
    """Return a listening socket for each worker; the system gives each connection to one of them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    create = partial(socket.create_server, family=family, backlog=1024)
    try:
        # First alone: the sockets of several workers would also share the port of another endpoint of this user.
        first = create((host, port))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(f"port {port} of {host}: {reason}; port 0 takes a free one") from error
    if workers == 1:
        return [first]
    with first:
        address = (host, first.getsockname()[1])
    return [create(address, reuse_port=True) for _ in range(workers)]


def _start(settings: Mapping[str, Any], sock: socket.socket) -> subprocess.Popen[bytes]:
    """Start a worker. Its settings are not on its command line, which all users can see."""
    line = json.dumps(settings, default=_as_text).encode() + b"\n"
    paths = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cachedfs.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[sock.fileno()],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: what it said says why
        process.stdin.write(line)
        process.stdin.flush()
    return process


def _as_text(value: Any) -> str:
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(
        f"serve: a {type(value).__name__} object cannot be given to another process; for credentials, give the name "
        "of a file, or its content as a dictionary"
    )


def _wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    said = json.loads(process.stdout.readline() or b"{}")
    if "ready" not in said:
        raise OSError(f"cannot serve: {said.get('error', 'the process has ended; its log says why')}")
