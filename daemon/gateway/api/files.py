"""`/v1/files`: training files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Form, Query, Request, UploadFile
from fastapi.responses import FileResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from ....jobs.errors import SpecError
from ..core.file_store import PURPOSE, FileObject
from ..core.state import AppState, StateDep
from ..http.errors import RESPONSES, unavailable

_MAX_FIELDS = 8  # of a form, held in memory
_FIELDS = {"file", "purpose"}
_MAX_UPLOADS = 4  # at a time; each is on disk twice for a moment


class _UploadRequest(Request):
    def form(self, **_: Any) -> Any:
        return super().form(max_files=1, max_fields=_MAX_FIELDS)


class UploadRoute(APIRoute):
    """A route for file uploads: checks the announced size first, limits concurrent uploads."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if "POST" not in (self.methods or ()):
            return handle
        uploads = asyncio.Semaphore(_MAX_UPLOADS)

        async def handle_upload(request: Request) -> Response:
            state: AppState = request.app.state.warmd
            announced = request.headers.get("content-length", "")
            await state.in_thread(state.files.check_room, int(announced or 0))
            if uploads.locked():
                raise unavailable("too many simultaneous uploads: try again in a moment")
            async with uploads:
                return await handle(_UploadRequest(request.scope, request.receive))

        return handle_upload


router = APIRouter(route_class=UploadRoute, prefix="/v1/files", tags=["files"], responses=RESPONSES)


class FileList(BaseModel):
    """Uploaded files, newest first."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    has_more: bool


class FileDeleted(BaseModel):
    """Confirmation of a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


@router.post("", response_model=FileObject)
async def upload_file(
    file: UploadFile, state: StateDep, request: Request, purpose: Annotated[str, Form()] = PURPOSE
) -> Any:
    """Store a JSONL, CSV or Parquet file for training; the end of its name says which."""
    for name in await request.form():
        if name not in _FIELDS:
            raise SpecError(name[:80], "unknown or not supported")
    if purpose != PURPOSE:
        raise SpecError("purpose", f"must be {PURPOSE}, got {purpose[:80]!r}")
    return await state.in_thread(state.files.add, file.file, file.filename or "")


@router.get("", response_model=FileList)
async def list_files(
    state: StateDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> Any:
    """List uploaded files, newest first."""
    found = await state.in_thread(state.files.all)
    if after is not None:
        ids = [file.id for file in found]
        found = found[ids.index(after) + 1 :] if after in ids else []
    return {"data": found[:limit], "has_more": len(found) > limit}


@router.get("/{file_id}", response_model=FileObject)
async def retrieve_file(file_id: str, state: StateDep) -> Any:
    """Show a file's name, size and date."""
    return await state.in_thread(state.files.get, file_id)


@router.get("/{file_id}/content", response_class=Response)
async def retrieve_file_content(file_id: str, state: StateDep) -> Response:
    """Return a file's content."""
    path = await state.in_thread(state.files.path, file_id)
    return FileResponse(path, media_type="application/octet-stream")


@router.delete("/{file_id}", response_model=FileDeleted)
async def delete_file(file_id: str, state: StateDep) -> Any:
    """Delete a file. A waiting job that uses it will fail."""
    await state.in_thread(state.files.remove, file_id)
    return {"id": file_id}
