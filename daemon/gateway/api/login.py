"""`/v1/warmd/login`: a cookie for the dashboard, in exchange for the token."""

from __future__ import annotations

import asyncio
import hmac
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from ....jobs.errors import Conflict
from ..core.state import StateDep
from ..http import session
from ..http.auth import WRONG_S
from ..http.errors import RESPONSES, ApiError
from ..http.strict import StrictRoute
from .changes import ChangeDep, Nothing

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/warmd", tags=["operation"], responses=RESPONSES
)


class Login(BaseModel):
    """The daemon's `http_token`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token: Annotated[str, Field(max_length=1000)]


@router.post("/login", status_code=204)
async def log_in(body: Login, request: Request, state: StateDep, _: ChangeDep) -> Response:
    """Set the cookie of the dashboard."""
    token = state.config.http_token
    if token is None or state.config.http_page == "off":
        raise Conflict("token: this daemon has no login: see http_token and http_page")
    if not hmac.compare_digest(body.token.encode(errors="replace"), token.encode()):
        await asyncio.sleep(WRONG_S)
        raise ApiError(401, "token: is not the daemon's http_token", code="invalid_api_key")
    done = Response(status_code=204)
    done.set_cookie(
        _name(request),
        session.issue(token),
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
