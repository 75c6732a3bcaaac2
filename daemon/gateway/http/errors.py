"""Error responses in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import redis
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from ....jobs.errors import Conflict, NotFound, SpecError, Unavailable, WarmdError
from ....jobs.user_code.tracebacks import cut
from .hidden import without_paths

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {413: "request_too_large", 507: "files_full"}
# Parts of pydantic's error locations that name a member of a union, not a field.
_MEMBER = re.compile(
    r"(function-|constrained-|nullable\[|list\[|dict\[|item:)|(str|int|float|bool)$"
)
_RETRY_S = "2"  # Retry-After while a process is starting or being replaced
_MAX_SHOWN = 40  # characters of a wrong value
_MAX_MESSAGE, _MAX_PARAM = 1000, 200  # characters


class ErrorDetail(BaseModel):
    """An error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is not 2xx."""

    error: ErrorDetail


class ApiError(Exception):
    """An error with its HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(cut(message, _MAX_MESSAGE))  # it may quote the request
        self.status = status
        self.param = None if param is None else cut(param, _MAX_PARAM)
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": without_paths(str(self)),
                "type": _TYPES.get(self.status, fallback),
                "param": self.param,
                "code": self.code or _CODES.get(self.status),
            }
        }

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def frame(error: ApiError, *, is_named: bool) -> bytes:
    """Return an error as the last server-sent event of a stream; `is_named`: it is a `problem`."""
    name = b"event: problem\n" if is_named else b""
    return name + b"data: " + orjson.dumps(error.body) + b"\n\n"


def from_warmd(error: WarmdError) -> ApiError:
    """Return the response to a WarmdError."""
    if isinstance(error, SpecError):
        if error.field == "home":  # a setting of the daemon, never a field of a request
            return unwritable(str(error))
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, NotFound):
        return ApiError(404, str(error))
    if isinstance(error, Conflict):
        return ApiError(409, str(error), headers={"x-should-retry": "false"})
    if isinstance(error, Unavailable):
        return unavailable(str(error))
    return ApiError(500, str(error), headers={"x-should-retry": "false"})


def unavailable(message: str) -> ApiError:
    """Return the error for something that will be available again in a moment."""
    return ApiError(503, message, headers={"retry-after": _RETRY_S})


def unwritable(message: str) -> ApiError:
    """Return the error for files that cannot be written, for example on a full disk."""
    return ApiError(507, message, code="disk_full")


def from_any(error: Exception) -> ApiError:
    """Return the response to any exception. Unexpected ones are logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, WarmdError):
        return from_warmd(error)
    if isinstance(error, redis.RedisError):
        return unavailable("Redis cannot be reached: try again in a moment")
    log.exception("http: unexpected error", exc_info=error)
    return ApiError(500, f"a bug in warmd: {type(error).__name__}: see the daemon's log")


def invalid(first: Mapping[str, Any], place: Iterable[str | int]) -> ApiError:
    """Return a validation error of pydantic as `field: must be X, got Y`."""
    names = [str(part) for part in place if not _MEMBER.match(str(part))]
    param = ".".join(names) or None
    problem = _problem(first)
    return ApiError(400, f"{param}: {problem}" if param else problem, param=param)


def _problem(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown or not supported"
    if error["type"] == "missing":
        return "must be given"
    if error["type"] == "union_tag_invalid":  # a part of a type that is not known
        found = error["ctx"]
        return (
            f"type must be one of {found['expected_tags']}, got {str(found['tag'])[:_MAX_SHOWN]!r}"
        )
    message = error["msg"].removeprefix("Value error, ")
    must = re.sub(r"^(Input|String|List|Dictionary|Value) should ", "must ", message)
    must = re.sub(r"(at (?:most|least) \d+ items?) after validation, not .*", r"\1", must)
    value = error.get("input")
    if must.startswith("must be ") and isinstance(value, str | int | float):
        shown = orjson.dumps(value).decode() if not isinstance(value, str) else repr(value)
        must += f", got {shown[:_MAX_SHOWN]}"
    return must


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


def _allowed(request: Request) -> str:
    """Return the methods of all routes with the request's path."""
    routes: list[BaseRoute] = request.app.routes

    def is_served(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in routes)

    return ", ".join(filter(is_served, _METHODS))


# Raised when the client has closed the connection.
CLIENT_DISCONNECTED = ApiError(499, "the client has disconnected")


def install(app: FastAPI) -> None:
    """Make the application return every error in OpenAI's shape."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        return from_any(error).response

    async def answer_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return invalid(first, first["loc"][1:]).response

    async def answer_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = _allowed(request)  # Starlette names those of the first route
        return ApiError(error.status_code, str(error.detail), headers=headers).response

    for kind in (ApiError, WarmdError, redis.RedisError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(Exception, answer)


# For the OpenAPI description of every route.
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "Invalid request; `param` names the field.",
        401: "The token is missing or wrong.",
        403: "The token lacks the right, or this host or web origin is not allowed.",
        404: "No such model, job or file.",
        408: "The request body did not arrive in time.",
        409: "The state of the job does not allow this.",
        413: "The request is too large.",
        415: "The body is not JSON.",
        429: "The queue is full.",
        500: "The job failed.",
        503: "Temporarily unavailable.",
        507: "The disk is full, or the limit for uploaded files is reached.",
    }.items()
}
