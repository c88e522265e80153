"""Parts shared by both server applications: routes with JSON errors, and parsing of JSON bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from posttrain.commands.serve.access import error_response
from posttrain.commands.serve.requests import BadRequest
from posttrain.errors import PosttrainError

Result = TypeVar("Result")


def build_application(routes: Sequence[Route]) -> Starlette:
    """Build an ASGI application that answers every error with JSON."""
    known = "; ".join(f"{min((route.methods or {'GET'}) - {'HEAD'})} {route.path}" for route in routes)

    async def respond(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        if isinstance(error, HTTPException):
            error = BadRequest(f"{error.detail}: this server answers {known}", status=error.status_code)
        if isinstance(error, RecursionError):
            error = BadRequest("the body is nested too deeply")
        if not isinstance(error, PosttrainError):  # print the traceback on the server
            error = PosttrainError(f"the server failed ({type(error).__name__}); see the server's terminal")
        return error_response(error)

    kinds: Sequence[object] = (PosttrainError, HTTPException, RecursionError, ClientDisconnect, Exception)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, respond))


class BodyReader:
    """Parses request bodies. Slow parsing runs in a single thread, while other requests are answered.

    A single thread, since tokenizers switch marker parsing globally.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "reader")

    async def run(self, work: Callable[..., Result], *about: object) -> Result:
        """Run slow work in the reader's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *about)

    async def parsed(self, content: bytes, read: Callable[[object], Result]) -> Result:
        """Parse a JSON body with ``read``.

        Raises:
            BadRequest: not JSON; see also ``read``.
        """

        def parse() -> Result:
            try:
                body = json.loads(content)
            except (ValueError, RecursionError) as error:
                problem = f"the body is not JSON: {type(error).__name__}: {error}"
                raise BadRequest(problem, code="no_json") from None
            return read(body)

        return await self.run(parse)
