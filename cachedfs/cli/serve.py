"""The command `serve`: URLs as buckets of an S3 endpoint, for programs that take neither fsspec URLs nor paths."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cachedfs.cli.arguments import CommonOptions, argument, command, flag, option
from cachedfs.cli.background import Daemon, Log, log_of, start
from cachedfs.cli.mount import check_exists
from cachedfs.cli.output import say
from cachedfs.cli.urls import cached_url, locate
from cachedfs.common.logging import public_url
from cachedfs.errors import OriginUnavailable

if TYPE_CHECKING:
    from cachedfs.server.serving import S3Address

PORT = 9000
READY = "ready"
# Environment variables.
ACCESS_KEY, SECRET_KEY = "CACHEDFS_SERVE_ACCESS_KEY", "CACHEDFS_SERVE_SECRET_KEY"


@command(
    "cachedfs serve data=gs://my-bucket/data",
    "cachedfs serve 'mine=drive://My Drive/data' data=s3://a-bucket --workers 4",
    "cachedfs serve --daemon --json data=gs://my-bucket/data",
)
def serve(
    common: CommonOptions,
    buckets: Annotated[list[str], argument("NAME=URL", "The name of a bucket, and what is in it.")],
    port: Annotated[int, option("N", "0 takes a free one.", default=True)] = PORT,
    host: Annotated[str, option("ADDRESS", "Where to listen.", default=True)] = "127.0.0.1",
    workers: Annotated[int, option("N", "Processes that answer.", default=True, min=1)] = 1,
    access_key: Annotated[
        str | None, option("KEY", "Of all clients.", default="new", envvar=ACCESS_KEY)
    ] = None,
    secret_key: Annotated[
        str | None, option("KEY", "Of all clients.", default="new", envvar=SECRET_KEY)
    ] = None,
    anonymous: Annotated[
        bool, flag("Answer all programs of this machine, without keys.", "--anonymous")
    ] = False,
    domain: Annotated[list[str] | None, option("NAME", "A name of this endpoint; repeatable.")] = None,
    allow_origin: Annotated[
        list[str] | None, option("URL", "Pages of this origin may read (CORS); repeatable.")
    ] = None,
    tls_cert: Annotated[str | None, option("FILE", "Certificate, for https.")] = None,
    tls_key: Annotated[str | None, option("FILE", "Its key.")] = None,
    metrics_port: Annotated[
        int | None, option("N", "Answer Prometheus at this port of 127.0.0.1.", min=0)
    ] = None,
    daemon: Daemon = False,
    log: Log = None,
    is_background: Annotated[bool, typer.Option("--is-background", hidden=True)] = False,
) -> None:
    """Serve URLs as buckets of a read-only S3 endpoint, until Ctrl-C.

    polars, DuckDB, Lance, Spark and others that speak S3 read them through
    the cache, and curl, GDAL and browsers at the same addresses.

    Give secrets in the environment (FSSPEC_GS_TOKEN, CACHEDFS_SERVE_SECRET_KEY):
    all users of the machine can see the command line while it runs.
    """
    from cachedfs.cli.prometheus import answering
    from cachedfs.cli.sim import usable_port
    from cachedfs.cli.stats import metrics_of
    from cachedfs.server.serving import S3Address, new_keys
    from cachedfs.server.serving import serve as run

    urls = named(buckets)
    for url in urls.values():
        with contextlib.suppress(OriginUnavailable):  # what is cached can be served
            check_exists(locate(url, common), is_writable=False)
    how: dict[str, Any] = {"port": port, "host": host, "workers": workers, "anonymous": anonymous}
    how |= {"tls_cert": tls_cert, "tls_key": tls_key}
    if not anonymous:
        access_key, secret_key = (access_key, secret_key) if access_key else new_keys()
        how |= {"access_key": access_key, "secret_key": secret_key}
    metrics: dict[str, Any] = {}
    if metrics_port is not None:
        metrics_port = usable_port(metrics_port)
        metrics = {"metrics": f"http://127.0.0.1:{metrics_port}/metrics"}
    if daemon:
        more = [] if metrics_port is None else [f"--metrics-port={metrics_port}"]
        more += [] if anonymous else [f"--access-key={access_key}", f"--secret-key={secret_key}"]
        port = usable_port(port)
        pid, log = serve_in_background(common, urls, port, more, log)
        address = S3Address(f"{'https' if tls_cert else 'http'}://{host}:{port}", access_key, secret_key)
        show(common, address, urls, pid=pid, log=log, **metrics)
        return
    located = {name: cached_url(url) for name, url in urls.items()}
    options = options_for(located.values(), common)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            run(located, domains=domain or (), allow_origins=allow_origin or (), **how, **options)
        )
        if metrics_port is not None:
            stack.enter_context(answering(metrics_port, partial(metrics_of, common.config())))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.terminate())
        if is_background:
            say(READY)
        else:
            show(common, server, urls, **metrics)
        server.wait()


def serve_in_background(
    common: CommonOptions, urls: Mapping[str, str], port: int, more: list[str], log: str | None
) -> tuple[int, str]:
    """Start this command again in the background; return its process id and its log once it is ready."""
    return start(
        common.in_foreground("--is-background", f"--port={port}", *more),
        ["serve", *(f"{name}={public_url(url)}" for name, url in urls.items())],
        log=log or log_of("serve", f"-{port}"),
        is_ready=lambda said: READY in said().decode(errors="replace").splitlines(),
        failed=f"port {port} is not served",
    )


def named(buckets: list[str]) -> dict[str, str]:
    """Return the URLs of buckets by their names. Raises BadParameter for one without a name."""
    found = {}
    for text in buckets:
        name, equals, url = text.partition("=")
        if not equals or "/" in name or ":" in name:
            raise typer.BadParameter(f"{text!r} has no name: write data={text}", param_hint="NAME=URL")
        found[name] = url
    return found


def options_for(urls: Iterable[str], common: CommonOptions) -> dict[str, Any]:
    """Return the common options, those of the origins under the protocol of each URL."""
    from cachedfs.common.urls import ORIGINS

    ours, theirs = common.split()
    protocols = {url.rpartition("::")[2].partition("://")[0] for url in urls}
    return ours | {ORIGINS.get(each, each): theirs for each in protocols}


def show(common: CommonOptions, server: S3Address, urls: dict[str, str], **process: Any) -> None:
    """Print what clients need to know."""
    value = {"url": server.url, "buckets": urls, "environment": server.environment, **process}
    value["storage_options"] = server.storage_options
    host, name = server.url.partition("://")[2], next(iter(urls))
    secret = f"KEY_ID '{server.access_key}', SECRET '{server.secret_key}', ENDPOINT '{host}'"
    is_tls = server.url.startswith("https")
    until = f"until kill {process['pid']}; log: {process['log']}" if "pid" in process else "until Ctrl-C"
    metrics = [f"metrics at {process['metrics']}"] if "metrics" in process else []
    common.show(
        value,
        f"serving {', '.join(urls)} at {server.url} {until}",
        *metrics,
        "",
        *(f"export {name}={value}" for name, value in server.environment.items()),
        "",
        "With these in the environment:",
        f'  polars   pl.scan_parquet("s3://{name}/a.parquet")',
        f'  Lance    lance.dataset("s3://{name}/a.lance")',
        f'  boto3    boto3.client("s3").list_objects_v2(Bucket="{name}")',
        f"  DuckDB   CREATE SECRET (TYPE s3, {secret}, USE_SSL {str(is_tls).lower()}, URL_STYLE 'path');",
        err=False,
    )
