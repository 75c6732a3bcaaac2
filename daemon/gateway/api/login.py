"""`/v1/warmd/login`: a cookie for the dashboard, in exchange for the token."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from ....jobs.errors import Conflict
from ..core.state import StateDep
from ..http import session
from ..http.auth import WRONG_S, address_of
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


@router.post("/login", status_code=204)
async def log_in(body: Login, request: Request, state: StateDep, _: ChangeDep) -> Response:
    """Set the cookie of the dashboard."""
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
    done = Response(status_code=204)
    done.set_cookie(
        _name(request),
        state.tokens.issue(client),
        max_age=session.LIFETIME_S,
        httponly=True,
        samesite="strict",
    )
    return done


@router.post("/logout", status_code=204)
async def log_out(body: Nothing, request: Request, _: ChangeDep) -> Response:
    """Remove the cookie of the dashboard."""
    done = Response(status_code=204)
    done.delete_cookie(_name(request), httponly=True, samesite="strict")
    return done


def _name(request: Request) -> str:
    return session.cookie_name(request.scope["server"][1])
