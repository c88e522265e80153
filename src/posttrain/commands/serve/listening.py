"""Local HTTP server used by ``posttrain serve`` and the studio."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from posttrain.errors import UsageError

if TYPE_CHECKING:
    from posttrain.commands.serve.access import Access


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; who connects waits until ``answer_requests``.

    Raises:
        UsageError: the address cannot be served.
    """
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror.partition(" (while")[0]
        where = f"--host {host}, port {port}"
        raise UsageError(f"{where}: cannot listen here ({reason}); choose another --host or --port") from error


def address_of(host: str, port: int) -> str:
    """Return ``http://127.0.0.1:8000``."""
    name = host
    if ":" in host:
        name = f"[{host}]"
    return f"http://{name}:{port}"


def answer_requests(application: Access, listener: socket.socket) -> None:
    """Answer until Ctrl-C."""
    import uvicorn

    from posttrain.commands.serve.limits import HeadTimeoutProtocol

    config = uvicorn.Config(
        application,
        http=HeadTimeoutProtocol,
        ws="none",
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        access_log=False,  # access logs would contain the key
        log_level="warning",
    )

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            """Shut down, closing open streams, since every open page holds one."""
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it reports each as a failure
            await super().shutdown(sockets)

    with suppress(KeyboardInterrupt):
        Server(config).run(sockets=[listener])
