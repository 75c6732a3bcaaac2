"""`/v1/warmd/login`, `…/logout`, `…/tickets`: sessions of the dashboard."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from ....jobs.errors import Conflict
from ..core.state import StateDep
from ..http import session
from ..http.auth import SESSION, WRONG_S, address_of
from ..http.errors import RESPONSES, ApiError
from ..http.rights import READ
from ..http.strict import StrictRoute
from .changes import ChangeDep, Nothing

log = logging.getLogger(__name__)

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/warmd", tags=["operation"], responses=RESPONSES
)


class Login(BaseModel):
    """The daemon's `http_token`, or one of `http_tokens` that may read."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token: Annotated[str, Field(max_length=1000)]


class LoggedIn(BaseModel):
    """The second secret of the session: the header `X-Warmd-Session` of its requests."""

    session: str


class TicketRequest(BaseModel):
    """The path of a GET request, without query."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: Annotated[str, Field(max_length=300, pattern=r"^/v1/[A-Za-z0-9._/-]+$")]


class Ticket(BaseModel):
    """The address that the session can request once, within 10 seconds, without a header."""

    url: str


@router.post("/login", response_model=LoggedIn)
async def log_in(body: Login, request: Request, state: StateDep, _: ChangeDep) -> Response:
    """Begin a session of the dashboard: set its cookie and return its second secret."""
    if not state.tokens.are_set or state.config.http_page == "off":
        raise Conflict("token: this daemon has no login: see http_token and http_page")
    client = state.tokens.client(body.token, address_of(request.scope))
    if client is None:
        await asyncio.sleep(WRONG_S)
        raise ApiError(401, "token: is not one that this daemon knows", code="invalid_api_key")
    if READ not in client.rights:
        problem = f"token: must have the right read for the dashboard, got {client.name}"
        raise ApiError(403, problem, code="insufficient_permissions")
    log.info("http: %s: logged in", client.name)
    issued = state.tokens.issue(client)
    done = JSONResponse({"session": issued.secret}, headers={"cache-control": "no-store"})
    done.set_cookie(
        _name(request),
        issued.cookie,
        max_age=session.LIFETIME_S,
        httponly=True,
        samesite="strict",
        secure=request.headers.get("origin", "").startswith("https://"),
    )
    return done


@router.post("/logout", status_code=204)
async def log_out(body: Nothing, request: Request, _: ChangeDep) -> Response:
    """Remove the cookie of the dashboard."""
    done = Response(status_code=204)
    done.delete_cookie(_name(request), httponly=True, samesite="strict")
    return done


@router.post("/tickets", response_model=Ticket)
async def issue_ticket(body: TicketRequest, request: Request, _: ChangeDep) -> Any:
    """Return an address for a download by a browser, which sends no headers of its page."""
    if (current := request.scope.get(SESSION)) is None:
        raise Conflict("path: only a session of the dashboard needs a ticket")
    return {"url": request.app.state.tickets.issue(body.path, current)}


def _name(request: Request) -> str:
    return session.cookie_name(request.headers.get("host", ""))
