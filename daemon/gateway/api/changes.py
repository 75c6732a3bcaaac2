"""Shared by all routes under `/v1/warmd/` that change something."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Depends, Header
from pydantic import BaseModel, ConfigDict


class Nothing(BaseModel):
    """An empty object: the request has no options."""

    model_config = ConfigDict(extra="forbid", strict=True)


async def _announced(
    x_warmd: Annotated[
        Literal["1"], Header(description="Pages of other origins cannot set this header.")
    ],
) -> None:
    """Describe the header that the middleware in `http/auth.py` has checked."""


ChangeDep = Annotated[None, Depends(_announced)]
