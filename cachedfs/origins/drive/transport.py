"""httplib2 connections for PyDrive2: bounded connects, no hidden retries, one kind of failure.

An HTTP proxy in the environment (`HTTPS_PROXY`) is used through a tunnel of Python's own. httplib2 would need PySocks,
and without it would connect directly.
"""

from __future__ import annotations

import base64
import functools
import http.client
import os
import select
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass

import httplib2
from google.auth import exceptions as google_errors
from oauth2client import client as oauth2client

from cachedfs.errors import AccessDenied, CachedFSError, SignInRefused
from cachedfs.origins.origin_errors import token_server_away, well_formed, without_secrets
from cachedfs.origins.retry import RetryableError, RetryReason, untrusted

__all__ = [
    "Answer",
    "HttpLike",
    "SignedHttp",
    "Signer",
    "Unreachable",
    "abort",
    "close",
    "connection_types",
    "keep_308",
    "proxy_of",
    "send",
    "troubled",
    "trusted",
]

_SIGN_IN_AGAIN = "sign in again"
_HTTP_PROXY = 3  # as PySocks numbers them
_OF_TLS = (
    "ca_certs",
    "cert_file",
    "disable_ssl_certificate_validation",
    "tls_maximum_version",
    "tls_minimum_version",
)
_SLICE = 64 << 10  # has left within the limit for silence where a line takes 2 kB a second


class Unreachable(OSError):
    """No connection: refused, unresolved, or not connected in time; nothing was sent."""


class HttpLike(Protocol):
    """The interface of PyDrive2's http objects."""

    def request(
        self,
        uri: str,
        method: str = "GET",
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[Any, bytes]:
        """Return the response (a mapping with `status`) and its body."""
        ...


class Answer(NamedTuple):
    """A response that was read to its end."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


def send(
    http: HttpLike, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """Send one request and return its answer, whatever its status, also a 308.

    Raises RetryableError if another attempt may succeed or the answer came through a redirect, and AccessDenied if the
    account gets no token.
    """
    try:
        with well_formed(), troubled():
            response, content = http.request(url, method=method, body=body, headers=dict(headers or {}))
    except MemoryError as error:
        raise RetryableError(RetryReason("the answer states an impossible length")) from error
    if getattr(response, "previous", None) is not None:  # what came is of another address
        raise RetryableError(RetryReason("the request was redirected, and Drive redirects none"))
    return Answer(response.status, {name.lower(): str(text) for name, text in response.items()}, content)


@contextmanager
def troubled(remedy: str = _SIGN_IN_AGAIN) -> Iterator[None]:
    """Turn exceptions of httplib2, sockets and the token libraries into RetryableError or AccessDenied.

    Their messages are quoted without secrets. They are not chained as a cause, which a traceback would print: a refusal
    by a token server contains its whole answer.
    """
    try:
        yield
    except (CachedFSError, RetryableError):
        raise
    except (google_errors.GoogleAuthError, oauth2client.Error) as error:
        raise _refused(error, remedy) from None
    except httplib2.RedirectLimit as error:
        raise RetryableError(RetryReason("the service redirects in a circle", is_final=True)) from error
    except ssl.SSLCertVerificationError as error:
        raise RetryableError(untrusted(_text(error))) from error
    except (OSError, http.client.HTTPException, httplib2.HttpLib2Error) as error:
        raise RetryableError(RetryReason(_text(error), is_unreachable=_is_unreachable(error))) from error


def _refused(error: Exception, remedy: str) -> RetryableError | AccessDenied:
    if token_server_away(error) is not None:
        return RetryableError(RetryReason(f"no token: {_text(error)}", is_unreachable=True))
    status = getattr(error, "status", None)  # of oauth2client; google-auth says `retryable`
    if getattr(error, "retryable", False) or (isinstance(status, int) and (status >= 500 or status == 429)):
        return RetryableError(RetryReason(f"no token: {_text(error)}"))
    return SignInRefused(f"Google Drive: no token for these credentials ({_text(error)}): {remedy}")


def _is_unreachable(error: BaseException) -> bool:
    # The last three are of connections that are not ours: after a redirect, or of an http object given to us.
    return isinstance(
        error, (Unreachable, httplib2.ServerNotFoundError, socket.gaierror, ConnectionRefusedError)
    )


def _text(error: Exception) -> str:
    # The first argument only, also of an error in it: google-auth puts the answer of the token endpoint into the others.
    told: object = error
    while isinstance(told, Exception) and not isinstance(told, OSError):
        told = (told.args or ("",))[0]
    text = without_secrets(str(told))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def keep_308(http: Any) -> None:
    """Make an http object return a 308 as it is: for an upload it means "continue", not a redirect."""
    codes = getattr(http, "redirect_codes", None)
    if codes is not None and 308 in codes:
        http.redirect_codes = frozenset(codes) - {308}


def close(http: Any) -> None:
    """Close the connections of an http object; it stays usable and connects again."""
    connections = getattr(http, "connections", None) or {}
    for connection in list(connections.values()):
        connection.close()
    connections.clear()


def abort(http: Any) -> None:
    """Abort the request that another thread is making on an http object, which is unusable afterwards."""
    http.is_aborted = True
    for connection in list((getattr(http, "connections", None) or {}).values()):
        connection.connect = _refuse
        if (sock := connection.sock) is not None:
            with suppress(OSError):
                # Closing would not wake who waits for data; and TLS must not notice, as it is that thread's.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _refuse() -> None:
    raise Unreachable("the request was canceled")


class Signer(Protocol):
    """Credentials that several http objects share."""

    connect_s: float

    def headers(self) -> dict[str, str]:
        """Return the headers of the present token."""
        ...

    def fresh_headers(self, http: HttpLike) -> dict[str, str]:
        """Return headers that can be sent; renew a token over `http` when it is about to expire."""
        ...

    def renew(self, refused: Mapping[str, str], http: HttpLike) -> bool:
        """Get another token than the refused one over `http`; return False if there is none."""
        ...


class SignedHttp:
    """An httplib2 object that sends credentials and renews refused ones; for one thread at a time."""

    def __init__(self, signer: Signer, http: Any) -> None:
        keep_308(http)
        self._signer, self._http = signer, http
        self._plain = _PlainHttp(http, connection_types(signer.connect_s))

    def request(
        self,
        uri: str,
        method: str = "GET",
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        redirections: int = 5,
        connection_type: Any = None,
    ) -> tuple[Any, bytes]:
        """Return response and body, as httplib2's own method does; after a 401, send once more with another token."""
        start = body.tell() if hasattr(body, "seek") and hasattr(body, "tell") else None
        ask = functools.partial(
            self._plain.request, uri, method, body, redirections=redirections, connection_type=connection_type
        )
        sent = self.fresh_headers()
        answer = ask(headers={**(headers or {}), **sent})
        if answer[0].status != 401 or not self.renew(sent):
            return answer
        if start is not None:
            body.seek(start)
        return ask(headers={**(headers or {}), **self._signer.headers()})

    def renew(self, refused: Mapping[str, str]) -> bool:
        """Get another token than the refused one, unless another thread just did; return False if there is none."""
        return self._signer.renew(refused, self._plain)

    def fresh_headers(self) -> dict[str, str]:
        """Return headers that can be sent; renew a token when it is about to expire."""
        return self._signer.fresh_headers(self._plain)

    def close(self) -> None:
        """Close the connections; the next request connects again."""
        close(self._http)

    def __del__(self) -> None:
        with suppress(AttributeError):  # never made completely
            close(self._http)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._http, name)


class _PlainHttp:
    """An httplib2 object with our connection classes and no credentials; tokens are requested over it."""

    def __init__(self, http: Any, types: Mapping[str, type[http.client.HTTPConnection]]) -> None:
        self._http, self._types = http, types

    def request(
        self,
        uri: str,
        method: str = "GET",
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        redirections: int = 5,
        connection_type: Any = None,
    ) -> tuple[Any, bytes]:
        """Return response and body."""
        kind = connection_type or self._types.get(uri.split(":", 1)[0].lower())
        try:
            return self._http.request(  # type: ignore[no-any-return]  # httplib2 has no types
                uri, method, body=body, headers=headers, redirections=redirections, connection_type=kind
            )
        except BaseException:  # an interrupt too breaks off in the middle of an exchange
            close(self._http)  # this connection must not carry the next one
            raise


def proxy_of(url: str) -> str | None:
    """Return the environment's proxy for `url`, or None; raise ValueError for a proxy that is not supported.

    Asked once per connection: aiohttp's own look at the environment would also read ~/.netrc for every request.
    """
    parts = urlsplit(url)
    # As httplib2 looks for it: what the system's own settings say counts for neither.
    given = os.environ.get(f"{parts.scheme}_proxy") or os.environ.get(f"{parts.scheme}_proxy".upper())
    if not given or _is_near(parts.hostname or ""):
        return None
    if not _is_http(given):
        raise ValueError(
            f"{parts.scheme}_proxy in the environment: only HTTP proxies are spoken to, written http://HOST:PORT, and "
            f"this is none; name one, or set no_proxy={parts.hostname}"
        )
    return given


def _is_http(proxy: str) -> bool:
    # With its port: those who connect do not agree on one to take without.
    with suppress(ValueError):
        parts = urlsplit(proxy)
        return parts.scheme == "http" and bool(parts.hostname) and parts.port is not None
    return False


def _is_near(host: str) -> bool:
    """Return whether a host needs no proxy: this machine, its metadata server, and hosts in `no_proxy`."""
    with suppress(ValueError):
        address = ip_address(host)
        return address.is_loopback or address.is_link_local or bool(proxy_bypass(host))
    return host in ("localhost", "metadata.google.internal") or bool(proxy_bypass(host))


@functools.cache
def connection_types(connect_s: float) -> Mapping[str, type[http.client.HTTPConnection]]:
    """Return the connection classes by URL scheme, for httplib2's `connection_type`.

    They raise Unreachable if no connection is made within `connect_s`, for each address of a host (finding the
    addresses may take longer). They wait for data, or to send a body, as long as httplib2's `timeout` says. They never
    repeat a request that must not be repeated.
    """
    return {
        "http": type("PlainConnection", (_Plain,), {"connect_s": connect_s}),
        "https": type("SecureConnection", (_Secure,), {"connect_s": connect_s}),
    }


class _Patient:
    """Mixin for httplib2's connection classes."""

    connect_s: float
    host: str
    port: int
    sock: Any
    timeout: float | None
    proxy_info: Any

    def connect(self) -> None:
        """Connect within `connect_s`; raise Unreachable if that fails."""
        stall_s, self.timeout = self.timeout, self.connect_s
        try:
            self._dial()
        except ssl.SSLError:  # somebody is there, but cannot prove who it is
            self.close()
            raise
        except OSError as error:
            self.close()
            raise Unreachable(f"cannot connect to {self.host}:{self.port}: {error}") from error
        finally:
            self.timeout = stall_s
        if self.connect is _refuse:  # `abort` came meanwhile, when there was no socket to break off
            self.close()
            _refuse()
        self.sock.settimeout(stall_s)

    def _dial(self) -> None:
        proxy = self.proxy_info
        if proxy is None or not proxy.applies_to(self.host) or _is_near(self.host):
            self._connect_directly()
        elif proxy.proxy_type == _HTTP_PROXY and proxy.proxy_host:
            self._connect_through(proxy)
        elif proxy.isgood():
            super().connect()  # type: ignore[misc]  # of httplib2: it speaks SOCKS, with PySocks
        else:
            raise OSError("the proxy of this http object cannot be used; a SOCKS proxy needs PySocks")

    def _connect_directly(self) -> None:
        raise NotImplementedError

    def _connect_through(self, proxy: Any) -> None:
        """Connect through the proxy: it sees the host's name and, with TLS, nothing else."""
        name = f"{unquote(proxy.proxy_user or '')}:{unquote(proxy.proxy_pass or '')}"
        sign_in = {"Proxy-Authorization": f"Basic {base64.b64encode(name.encode()).decode()}"}
        target = self.host, self.port
        self.set_tunnel(*target, headers=sign_in if proxy.proxy_user else None)  # type: ignore[attr-defined]
        self.host, self.port = proxy.proxy_host, proxy.proxy_port
        try:
            self._connect_directly()
        finally:
            self.host, self.port = target

    def send(self, data: Any) -> None:
        """Send bytes in slices: a socket's timeout covers everything given to it at once, not only its silence."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            super().send(data)  # type: ignore[misc]  # a file, which is sent by pieces of its own
            return
        view = memoryview(data)
        for start in range(0, len(view), _SLICE):
            super().send(view[start : start + _SLICE])  # type: ignore[misc]

    def request(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Send a request, on a new connection if the service has closed the old one."""
        if self.sock is not None and _is_stale(self.sock):
            self.close()
        super().request(method, *args, **kwargs)  # type: ignore[misc]

    def getresponse(self) -> Any:
        """Return the response; on BadStatusLine httplib2 would repeat the request, even one that creates a file."""
        try:
            return super().getresponse()  # type: ignore[misc]
        except (http.client.BadStatusLine, http.client.ResponseNotReady) as error:
            raise ConnectionResetError(f"{self.host} closed the connection without an answer") from error

    def close(self) -> None:
        super().close()  # type: ignore[misc]


class _Plain(_Patient, httplib2.HTTPConnectionWithTimeout):  # type: ignore[misc]
    def _connect_directly(self) -> None:
        # Python's own: tries every address of the host, where httplib2's stops at one that is silent.
        http.client.HTTPConnection.connect(self)


class _Secure(_Patient, httplib2.HTTPSConnectionWithTimeout):  # type: ignore[misc]
    def __init__(self, host: str, port: int | None = None, **options: Any) -> None:
        super().__init__(host, port, **options)
        # An http object that says something of TLS has it its own way.
        if "HTTPLIB2_CA_CERTS" not in os.environ and not any(map(options.get, _OF_TLS)):
            self._context = trusted()

    def _connect_directly(self) -> None:
        http.client.HTTPSConnection.connect(self)


def trusted() -> ssl.SSLContext:
    """Return the TLS context for media and all other requests: the system's authorities, or those in SSL_CERT_FILE.

    If the system has none, httplib2's are used.
    """
    return _trusted(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.cache
def _trusted(*named: str | None) -> ssl.SSLContext:
    # Some hundred certificates: read once for all connections, and again where the variables `named` change.
    context = ssl.create_default_context()
    folder = ssl.get_default_verify_paths().capath  # looked into when somebody answers
    if not context.cert_store_stats()["x509"] and not (folder and os.listdir(folder)):
        context.load_verify_locations(httplib2.CA_CERTS)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _is_stale(sock: socket.socket) -> bool:
    """Return whether an idle connection is readable, which means that the service has closed it."""
    if sock.fileno() < 0:
        return True
    if hasattr(select, "poll"):  # no limit to the number of a descriptor; not on Windows
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))
    return bool(select.select([sock], [], [], 0)[0])
