"""What goes wrong, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import redis
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ....jobs.errors import Conflict, NotFound, SpecError, Unavailable, WarmdError

log = logging.getLogger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_CODES = {413: "request_too_large", 507: "files_full"}
_MEMBERS = ("function-", "constrained-")  # pydantic's names for such
_BACK_IN_S = "2"  # how soon what is starting or being replaced is worth another try


class ErrorDetail(BaseModel):
    """The inside of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not 2xx."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, fallback),
                "param": self.param,
                "code": self.code or _CODES.get(self.status),
            }
        }

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def from_warmd(error: WarmdError) -> ApiError:
    """Return what a client is told of an error of warmd's own."""
    if isinstance(error, SpecError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, NotFound):
        return ApiError(404, str(error))
    if isinstance(error, Conflict):
        return ApiError(409, str(error), headers={"x-should-retry": "false"})
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), headers={"retry-after": _BACK_IN_S})
    return ApiError(500, str(error), headers={"x-should-retry": "false"})


def unavailable(message: str) -> ApiError:
    """Return the error of what will be back in a moment."""
    return ApiError(503, message, headers={"retry-after": _BACK_IN_S})


def from_any(error: Exception) -> ApiError:
    """Return what a client is told of any error; one that nobody foresaw goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, WarmdError):
        return from_warmd(error)
    if isinstance(error, redis.RedisError):
        return unavailable("the queue's server is away: try again in a moment")
    log.exception("http: unforeseen", exc_info=error)
    return ApiError(500, f"a bug in warmd: {type(error).__name__}: see the daemon's log")


def invalid(first: Mapping[str, Any], place: Iterable[str | int]) -> ApiError:
    """Return the first problem that pydantic found in a request, and the place where it is."""
    # The member of a union that did not take the value: noise to whoever wrote the request.
    names = [str(part) for part in place if not str(part).startswith(_MEMBERS)]
    param = ".".join(names) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: unknown or not supported here", param=param)
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param=param)


# Raised where nobody reads the answer any more.
CLIENT_GONE = ApiError(499, "the client has gone")


def install(app: FastAPI) -> None:
    """Have the application answer every error in OpenAI's shape."""

    async def answer(_: Request, error: Exception) -> JSONResponse:
        return from_any(error).response

    async def answer_invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return invalid(first, first["loc"][1:]).response

    async def answer_http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response

    for kind in (ApiError, WarmdError, redis.RedisError):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(RequestValidationError, answer_invalid)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(Exception, answer)


# What FastAPI writes into the description of every route.
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "The request is wrong; `param` names where.",
        401: "The token is missing or wrong.",
        403: "Not from this host or this web page.",
        404: "No such model, job or file.",
        408: "The request stopped in the middle.",
        409: "It exists, but its state does not allow this.",
        413: "The request is too large.",
        429: "Too many requests wait already.",
        500: "The job failed.",
        503: "Nobody can answer just now.",
        507: "The uploaded files take all the room that they may.",
    }.items()
}
