"""What libraries raise becomes an error of ours, which names the URL and quotes no secret."""

import asyncio
import json
import traceback
import types

import aiohttp
import pytest

from cachedfs.errors import AccessDenied, OriginUnavailable
from cachedfs.origins.failures import mapped, translate, without_secrets


@pytest.mark.parametrize(
    "secret",
    [
        "GET https://host/tokeninfo?access_token=SECRET&x=1",
        "refresh_token=SECRET",
        "Authorization: Bearer SECRET",
        "https://host/b/k?X-Goog-Signature=SECRET",
        "https://host/b/k?sig=SECRET'",
        "token 'ya29.SECRET' is bad",
        "client_secret=SECRET)",
        "password=SECRET",
    ],
)
def test_messages_lose_their_secrets_and_nothing_else(secret):
    assert "SECRET" not in without_secrets(secret)
    assert without_secrets(secret.replace("SECRET", "")) != secret
    assert (
        without_secrets("no/such/object?alt=media&generation=12") == "no/such/object?alt=media&generation=12"
    )


def test_an_error_that_quotes_a_token_leaves_its_cause_behind():
    with pytest.raises(OriginUnavailable) as caught, mapped("gs://b/k", "reading it"):
        raise ConnectionError("https://oauth2.googleapis.com/tokeninfo?access_token=SECRET refused")
    text = "".join(traceback.format_exception(caught.value))
    assert "gs://b/k" in text
    assert "SECRET" not in text


def test_an_answer_that_is_not_json_is_no_usable_answer():
    with pytest.raises(OriginUnavailable, match="gs://b/k"), mapped("gs://b/k", "writing it"):
        json.loads("<html>")


async def test_what_is_no_http_is_no_usable_answer_though_aiohttp_calls_it_a_400():
    """As where bytes behind one answer are taken for the next on the same connection."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"bytes of an earlier answer\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with (
        await asyncio.start_server(answer, "127.0.0.1", 0) as server,
        aiohttp.ClientSession() as session,
    ):
        host, port = server.sockets[0].getsockname()
        with pytest.raises(OriginUnavailable, match="gs://b/k") as caught, mapped("gs://b/k", "writing it"):
            await session.get(f"http://{host}:{port}/")
    assert caught.value.__cause__.status == 400


def test_an_error_that_has_a_status_is_not_asked_for_its_code():
    error = aiohttp.TooManyRedirects(types.SimpleNamespace(real_url="http://host"), ())  # its code warns
    assert isinstance(translate(error, "gs://b/k", "writing it"), OriginUnavailable)


def test_an_error_without_secrets_keeps_its_cause():
    with pytest.raises(AccessDenied) as caught, mapped("gs://b/k", "reading it"):
        raise PermissionError("not yours")
    assert isinstance(caught.value.__cause__, PermissionError)
