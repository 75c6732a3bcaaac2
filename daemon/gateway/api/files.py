"""`/v1/files`: the data of training jobs."""

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
from ..core.state import Gate, GateDep
from ..http.errors import RESPONSES, unavailable

_MOST_FIELDS = 8  # of a form; each stays in memory
_AT_ONCE = 4  # uploads; each is on the disk twice for a moment


class _UploadRequest(Request):
    def form(self, **_: Any) -> Any:
        return super().form(max_files=1, max_fields=_MOST_FIELDS)


class UploadRoute(APIRoute):
    """A route that takes one file, and no more of them at once than there is room for."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        uploads = asyncio.Semaphore(_AT_ONCE)

        async def handle_upload(request: Request) -> Response:
            gate: Gate = request.app.state.gate
            announced = request.headers.get("content-length", "")
            await gate.blocking(gate.files.check_room, int(announced or 0))
            if uploads.locked():
                raise unavailable("too many uploads at once: try again in a moment")
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
    """A file that is gone."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


@router.post("", response_model=FileObject)
async def upload_file(
    file: UploadFile, gate: GateDep, purpose: Annotated[str, Form()] = PURPOSE
) -> Any:
    """Take a JSONL file for training."""
    if purpose != PURPOSE:
        raise SpecError("purpose", f"must be {PURPOSE}, got {purpose[:80]!r}")
    return await gate.blocking(gate.files.add, file.file, file.filename or "")


@router.get("", response_model=FileList)
async def list_files(
    gate: GateDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> Any:
    """List uploaded files, newest first."""
    found = await gate.blocking(gate.files.all)
    if after is not None:
        ids = [file.id for file in found]
        found = found[ids.index(after) + 1 :] if after in ids else []
    return {"data": found[:limit], "has_more": len(found) > limit}


@router.get("/{file_id}", response_model=FileObject)
async def retrieve_file(file_id: str, gate: GateDep) -> Any:
    """Describe a file."""
    return await gate.blocking(gate.files.get, file_id)


@router.get("/{file_id}/content", response_class=Response)
async def retrieve_file_content(file_id: str, gate: GateDep) -> Response:
    """Return a file's bytes."""
    path = await gate.blocking(gate.files.path, file_id)
    return FileResponse(path, media_type="application/octet-stream")


@router.delete("/{file_id}", response_model=FileDeleted)
async def delete_file(file_id: str, gate: GateDep) -> Any:
    """Forget a file. A job that was made with it and still waits will fail."""
    await gate.blocking(gate.files.remove, file_id)
    return {"id": file_id}
