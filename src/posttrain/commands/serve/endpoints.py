"""HTTP endpoints of both servers: applications, JSON bodies and error responses."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from posttrain.commands.serve.requests import BadRequest
from posttrain.errors import PosttrainError, UsageError


def build_application(routes: Sequence[Route]) -> Starlette:
    """Build an ASGI application that answers errors in OpenAI format; unknown paths list the routes."""
    known = "; ".join(f"{min(route.methods or ['GET'])} {route.path}" for route in routes)

    async def respond(_: Request, error: Exception) -> Response:
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


def parse_json(content: bytes) -> object:
    """Parse a body.

    Raises:
        BadRequest: not JSON.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        problem = f"the body is not JSON: {type(error).__name__}: {error}"
        raise BadRequest(problem, code="no_json") from None


def error_body(error: PosttrainError) -> dict[str, object]:
    """Build an error body in OpenAI format."""
    kind = "server_error"
    code = None
    if isinstance(error, UsageError):
        kind = "invalid_request_error"
        code = "invalid_request"
    param = getattr(error, "param", None)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": getattr(error, "code", code)}}


def error_response(error: PosttrainError) -> Response:
    """Build an HTTP error response."""
    status = 500
    if isinstance(error, UsageError):
        status = 400
    status = getattr(error, "status", status)
    content = json.dumps(error_body(error))  # in ASCII: a message may quote half of a surrogate pair
    headers = {}
    if status == 408:  # what still arrives of the body is not the next request
        headers["Connection"] = "close"
    return Response(content, status, headers, media_type="application/json")
