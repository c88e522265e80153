"""Addresses of servers as recipes and options name them, and which of them may have a key."""

from __future__ import annotations

import os
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, ValidationInfo

from posttrain.errors import UsageError, hide_secrets
from posttrain.option_types import shorten

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?")
_PATH = re.compile(r"[!-~]*")


def server_address(
    url: str, where: str = "engine.url", variable: str = "VLLM_API_KEY"
) -> tuple[str, str, int | None, str]:
    """(scheme, host, port, path prefix) of a server's URL; an ending ``/v1`` is dropped.

    ``where`` is the key that it stands under, ``variable`` where a key for the server belongs, for messages.

    Raises:
        UsageError: not an http or https URL.
    """
    if "@" in url or hide_secrets(url) != url:  # looked for first: a message about the port would show a password
        raise UsageError(
            f"{where}: {shorten(hide_secrets(url))}: a name, password or key in a URL would be written down with "
            f"it; write it like http://127.0.0.1:8000, and put a key into the environment variable {variable}"
        )
    try:
        parts = urlsplit(url.strip())
        scheme, host, port = parts.scheme, parts.hostname or "", parts.port
    except ValueError as error:
        raise _no_url(url, where, variable, f" ({error})") from None
    is_address = ":" in host and parts.netloc.rpartition("@")[2].startswith("[")
    if scheme not in ("http", "https") or not (is_address or _HOST.fullmatch(host)) or port == 0:
        raise _no_url(url, where, variable)
    if parts.query or parts.fragment or not _PATH.fullmatch(parts.path) or not url.isprintable():
        raise _no_url(url, where, variable)
    return scheme, host, port, parts.path.rstrip("/").removesuffix("/v1")


def key_for(url: str, where: str, variable: str) -> str | None:
    """The key in the environment ``variable``, if the server at ``url`` may have it: it is on this machine, or named.

    A recipe may be a stranger's, and names its own server: that alone sends no key there. The environment says where
    one may go, beside it: ``JUDGE_API_HOST`` for ``JUDGE_API_KEY``, a host or several with commas between them.

    Raises:
        UsageError: there is a key, and it is not said that it may go there.
    """
    key, host = os.environ.get(variable), server_address(url, where, variable)[1]
    allowed = f"{variable.removesuffix('_KEY')}_HOST"
    if not key or host in LOOPBACK or host in map(str.strip, os.environ.get(allowed, "").split(",")):
        return key
    raise UsageError(
        f"{where}: {url}: {variable} holds a key, and a recipe alone sends it to no server; "
        f"if it may go there, set {allowed}={host}, else unset {variable}"
    )


def checked_url(url: str, about: ValidationInfo) -> str:
    """The URL, if it is a server's and holds no secret: what recipes, records and results may keep.

    Raises:
        UsageError: it is none, or a name, a password or a key stands in it.
    """
    server_address(url, f"{(about.context or {}).get('where', 'engine')}.{about.field_name}")
    return url


ServerUrl = Annotated[str, AfterValidator(checked_url)]


def _no_url(url: str, where: str, variable: str, reason: str = "") -> UsageError:
    return UsageError(
        f"{where}: {shorten(hide_secrets(url))} is no server's URL{reason}; write it like http://127.0.0.1:8000 "
        f"(a key belongs into the environment variable {variable})"
    )
