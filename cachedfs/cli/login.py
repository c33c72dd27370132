"""The commands `login`, `logout` and `accounts`: sign in to Google Drive, once for all programs of a user."""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import sys
import webbrowser
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote

import typer
from rich.filesize import decimal

from cachedfs.cli.arguments import CommonOptions, argument, command, flag, option
from cachedfs.cli.output import message_of, print_json, print_table, say, table_of

OUR_OPTIONS = ("as_json", "debug", "options")
KINDS = {"authorized_user": "user", "service_account": "service account"}
TRIES = 3
NO_BROWSER = "Print the address to open, and ask for the one that follows."
T = TypeVar("T")
STEPS = """\
Google wants every user to have an OAuth client. You make yours once, in about
two minutes and free of charge.

1. Make a project; any name will do:
     https://console.cloud.google.com/projectcreate
2. Enable the Google Drive API in it:
     https://console.cloud.google.com/apis/library/drive.googleapis.com
3. Describe the app. Click Get started, enter any name and your own address,
   and choose the audience External (in a company with Google Workspace:
   Internal, which needs no publishing):
     https://console.cloud.google.com/auth/overview
   Then click Publish app. While an app is in testing, each sign-in ends after
   7 days:
     https://console.cloud.google.com/auth/audience
4. Create a client of the type Desktop app, and download its JSON at once, as
   its secret is shown only then:
     https://console.cloud.google.com/auth/clients/create
"""
CONSENT = """\
{n}. Allow access in your browser. Google warns that it has not verified the app.
   The warning is expected, and harmless here, as the app is your own: click
   Advanced, then "Go to ... (unsafe)".
"""
WAITING = """\
If no window has opened, open this address on this machine:

{url}

Waiting for your browser. Ctrl-C ends the sign-in.
"""


@command(
    "cachedfs login drive",
    "cachedfs login drive --client ~/Downloads/client_secret.json",
    "cachedfs login drive --account work --read-only",
    "cachedfs login drive --service-account key.json",
    common=OUR_OPTIONS,
)
def login(
    common: CommonOptions,
    service: Annotated[str, argument("drive", "Where to sign in.")],
    client: Annotated[str | None, option("FILE", "The JSON of your OAuth client (a Desktop app).")] = None,
    service_account: Annotated[
        str | None, option("FILE", "Sign in with this key of a service account.")
    ] = None,
    no_browser: Annotated[bool, flag(NO_BROWSER, "--no-browser")] = False,
    read_only: Annotated[bool, flag("Ask for reading only.", "--read-only")] = False,
    account: Annotated[
        str | None, option("NAME", "Save the sign-in under NAME.", default="its address")
    ] = None,
) -> None:
    """Sign in to Google Drive, step by step.

    Afterwards drive:// URLs work in all programs of this user, without options.
    """
    if service != "drive":
        raise typer.BadParameter("only drive has a sign-in; for gs:// use gcloud", param_hint="SERVICE")
    from fsspec.config import conf

    try:
        from cachedfs.origins.base import int_of
        from cachedfs.origins.drive import accounts, browser_login
        from cachedfs.origins.drive.credentials import SCOPE
        from cachedfs.origins.drive.options import DriveOptions
    except ImportError as error:
        raise ImportError(
            'signing in to Google Drive needs the extra: pip install "cachedfs[drive]"'
        ) from error
    if service_account and (client or no_browser):
        what = "a service account has a key, and no client or browser"
        raise typer.BadParameter(what, param_hint="--service-account")
    accounts.path_of("default" if account is None else account)  # fails before the sign-in if saving it would
    scope = f"{SCOPE}.readonly" if read_only else SCOPE
    if service_account:
        info = browser_login.read_key(typed_path(service_account))
        info |= {"scopes": [scope]} if read_only else {}
    else:
        info = signed_in(client, scope, account, no_browser=no_browser)
    options = DriveOptions.of({**conf.get("drive", {}), **common.split()[1]})
    found = browser_login.about(info, options.endpoint_url)
    user, quota = found["user"], found.get("storageQuota") or {}
    email = str(user.get("emailAddress") or info.get("client_email") or user.get("permissionId"))
    if info["type"] == "authorized_user":
        info["account"] = email  # keeps the cached data of two accounts apart
    name = accounts.check_name(account or email)
    path = accounts.save(name, info)
    is_default = default_account() == name
    value = {"display_name": user.get("displayName"), "used": int_of(quota.get("usage"))}
    value |= {"limit": int_of(quota.get("limit")), "file": str(path)}
    what = "reading only" if read_only else "reading and writing"
    common.show(
        described(name, info, is_default=is_default) | value,
        f"Signed in as {user.get('displayName') or email} <{email}>, for {what}; {text_of_storage(quota)}.",
        f"Saved in {path}.",
        "",
        *what_to_type(name, info, is_default=is_default),
        err=False,
    )


@command("cachedfs logout", "cachedfs logout work", common=OUR_OPTIONS)
def logout(
    common: CommonOptions,
    name: Annotated[str | None, argument("[NAME]", "The account; by default the default one.")] = None,
) -> None:
    """Revoke a saved sign-in to Google Drive, and remove it."""
    from cachedfs.origins.drive import accounts, browser_login

    name = name or accounts.default_name()
    if name is None:
        raise ValueError("no account is saved: there is nothing to sign out from")
    path, problem = accounts.path_of(name), None
    if not path.exists():
        accounts.load(name)  # raises the error that names the others
    info = sign_in_of(name)
    if info.get("type") != "authorized_user":
        problem = "the key works until you delete it in Google's console" if info else "the file was damaged"
    elif twins := [
        each for each in accounts.names() if each != name and grant_of(sign_in_of(each)) == grant_of(info)
    ]:
        problem = f"account {twins[0]} is the same sign-in to Google, and goes on"
    else:
        try:
            browser_login.revoke(info)
        except OSError as error:
            page = browser_login.GRANTS_PAGE
            problem = f"{error}. Until you remove the app at {page}, copies of the token work"
    accounts.remove(name)
    said = f"{path} is removed. Nothing was revoked: {problem}."
    if problem is None:
        said = f"Google revoked the token, and {path} is removed."
    value = {"name": name, "revoked": problem is None, "problem": problem, "file": str(path)}
    common.show(value, f"Signed out {name}: {said}", err=False)


@command("cachedfs accounts", "cachedfs accounts --default work", common=("as_json", "debug"))
def accounts(
    common: CommonOptions,
    default: Annotated[str | None, option("NAME", "Use this account where none is named.")] = None,
) -> None:
    """List the saved sign-ins to Google Drive."""
    from cachedfs.origins.drive import accounts as saved

    if default is not None:
        saved.set_default(default)
    chosen = default_account()
    rows = [described(name, sign_in_of(name), is_default=name == chosen) for name in saved.names()]
    if common.as_json:
        print_json(rows)
    elif not rows:
        say("No account is saved: `cachedfs login drive` signs in.", err=True)
    else:
        heads, names = ("account", "address", "kind", "scope", ""), ("name", "address", "kind", "scope")
        shown = [row | {"kind": row["kind"] or "damaged"} for row in rows]
        cells = [[*(row[name] or "" for name in names), "default" if row["default"] else ""] for row in shown]
        table = table_of(heads, cells, left=heads)
        for column in table.columns:
            column.no_wrap = False
        print_table(table)


# The sign-in of a user


def signed_in(client: str | None, scope: str, account: str | None, *, no_browser: bool) -> dict[str, Any]:
    """Guide a user through the sign-in; return what is to be saved."""
    from cachedfs.origins.drive import browser_login

    can_ask, n = is_terminal(), 1
    if no_browser and not can_ask:
        raise ValueError("--no-browser asks for an address: run it in a terminal")
    if client is not None:
        known = browser_login.read_client(typed_path(client))
    elif (saved := saved_client(account)) is not None:
        print_lines(f"With the OAuth client of account {saved[0]}; --client FILE takes another.\n")
        known = saved[1]
    elif can_ask:
        print_lines(STEPS)
        known, n = ask_for_client(), 5
        print_lines("")
    else:
        raise ValueError(
            "a first sign-in needs an OAuth client: run `cachedfs login drive` in a terminal, which says how to make one, or "
            "pass --client FILE or --service-account FILE"
        )
    hint = account if account and "@" in account else None
    print_lines(CONSENT.format(n=n))
    if not no_browser and has_browser():
        return browser_login.by_browser(known, scope, hint, WAITING)
    if not can_ask:
        raise ValueError("there is no browser here: run `cachedfs login drive --no-browser` in a terminal")
    return browser_login.by_pasting(known, scope, hint, ask_for_address)


def is_terminal() -> bool:
    """Return whether questions can be answered."""
    return sys.stdin.isatty()


def has_browser() -> bool:
    """Return whether a browser can be opened; one in the terminal cannot show Google's pages."""
    try:
        return type(webbrowser.get()) is not webbrowser.GenericBrowser or "BROWSER" in os.environ
    except webbrowser.Error:
        return False


def ask_for_client() -> dict[str, str]:
    """Ask for the JSON file of the OAuth client."""
    from cachedfs.origins.drive import browser_login

    found = glob.glob(os.path.expanduser("~/Downloads/client_secret*.json"))
    newest = max(found, key=os.path.getmtime, default=None)
    question = "Path of that JSON file (or drag it here)"
    return ask(question, lambda text: browser_login.read_client(typed_path(text)), newest)


def ask_for_address(url: str) -> str:
    """Show Google's page; return the address of the page that follows it."""
    from cachedfs.origins.drive.browser_login import checked_address

    print_lines(f"Open this address in any browser:\n\n{url}\n")
    print_lines(
        "After you allow access, the browser cannot open the next page. Copy the address of that page.\n"
    )
    return ask("Paste that address", checked_address)


def ask(question: str, read: Callable[[str], T], default: str | None = None) -> T:
    """Ask until `read` accepts the answer, at most `TRIES` times; return its result."""
    for _ in range(TRIES - 1):
        try:
            return read(typer.prompt(question, default=default, err=True))
        except (OSError, ValueError) as error:
            print_lines(f"{message_of(error)}\n")
    return read(typer.prompt(question, default=default, err=True))


def typed_path(text: str) -> str:
    """Return a path as typed, or as a terminal writes a dragged file: with quotes, backslashes, file:// or ~."""
    text = text.strip()
    with contextlib.suppress(ValueError):  # an apostrophe in the name
        if not os.path.exists(text) and len(words := shlex.split(text)) == 1:
            text = words[0]
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://").removeprefix("localhost"))
    return os.path.expanduser(text)


def saved_client(account: str | None) -> tuple[str, dict[str, str]] | None:
    """Return the OAuth client of a saved account, and that account: this one, the default one or any other."""
    from cachedfs.origins.drive import accounts

    default = default_account()
    for name in sorted(accounts.names(), key=lambda each: (each != account, each != default)):
        with contextlib.suppress(KeyError):
            info = sign_in_of(name)
            return name, {key: info[key] for key in accounts.CLIENT}
    return None


def default_account() -> str | None:
    """Return the default account; None also if several are saved and none of them was chosen."""
    from cachedfs.origins.drive import accounts

    with contextlib.suppress(PermissionError):
        return accounts.default_name()
    return None


def sign_in_of(name: str) -> dict[str, Any]:
    """Return what is saved of an account; empty if its file is damaged."""
    from cachedfs.origins.drive import accounts

    with contextlib.suppress(PermissionError):
        return accounts.load(name)
    return {}


def grant_of(info: Mapping[str, Any]) -> list[Any]:
    """Return what Google revokes at once: saved sign-ins of the same client and account."""
    return [info.get(key) for key in ("type", "client_id", "account")]


# What is shown


def print_lines(text: str) -> None:
    """Print lines on stderr, so that stdout has only the result."""
    for line in text.split("\n"):
        say(line, err=True)


def described(name: str, info: Mapping[str, Any], *, is_default: bool) -> dict[str, Any]:
    from cachedfs.origins.drive.credentials import SCOPE

    scopes = info.get("scopes") or ([SCOPE] if info else [])
    return {
        "name": name,
        "address": info.get("account") or info.get("client_email"),
        "kind": KINDS.get(info.get("type", "")),
        "scope": " ".join(scope.rpartition("/auth/")[2] for scope in scopes) or None,
        "default": is_default,
    }


def what_to_type(name: str, info: Mapping[str, Any], *, is_default: bool) -> list[str]:
    place, lines = "My Drive", list[str]()
    if info["type"] == "service_account":
        place, who = "Shared with me", info["client_email"]
        lines += [f"Share files and folders with {who}: a service account has none of its own.", ""]
    more = "" if is_default else f" -o account={shlex.quote(name)}"
    keywords = "" if is_default else f', drive={{"account": "{name}"}}'
    lines += ["Now try, in a shell and in Python:", f'  cachedfs ls{more} "drive://{place}"']
    lines += [f'  import fsspec; print(fsspec.filesystem("cdrive"{keywords}).ls("{place}"))']
    if not is_default:
        lines += ["", f"`cachedfs accounts --default {shlex.quote(name)}` makes it the default."]
    return lines


def text_of_storage(quota: Mapping[str, Any] | None) -> str:
    """Return how much of an account's storage is used, as text; some accounts have no limit."""
    used, limit = ((quota or {}).get(name) for name in ("usage", "limit"))
    return f"{decimal(int(used or 0))} used" + (f" of {decimal(int(limit))}" if limit else "")
