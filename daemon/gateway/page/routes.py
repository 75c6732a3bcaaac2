"""`/` and `/page/…`: the dashboard's files, as they are in the folder `site`.

Only names that are in the folder at the start can be requested.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ..http.errors import ApiError

router = APIRouter(include_in_schema=False)

SITE = Path(__file__).parent / "site"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES = {str(path.relative_to(SITE)): path for path in SITE.rglob("*") if path.suffix in _TYPES}
_HEADERS = {
    # No inline scripts, nothing from elsewhere, and no text as HTML (trusted types): text of a
    # model cannot become code, which could read the secret of the session.
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # revalidated each time: 304 unless warmd was upgraded
}


@router.head("/")
@router.get("/")
async def show_page(request: Request) -> Response:
    return _file(request, "index.html")


@router.head("/page/{name:path}")
@router.get("/page/{name:path}")
async def show_file(request: Request, name: str) -> Response:
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    config: Any = request.app.state.warmd.config
    if config.http_page == "off" or name not in _FILES:
        raise ApiError(404, "Not Found")
    path = _FILES[name]
    content = path.read_bytes()
    headers = {**_HEADERS, "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=_TYPES[path.suffix], headers=headers)
