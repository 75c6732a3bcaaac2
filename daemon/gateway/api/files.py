"""`/v1/files`: training files."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, BinaryIO, Literal, cast

from fastapi import APIRouter, Form, Query, Request, UploadFile
from fastapi.responses import FileResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ....jobs.errors import Conflict, SpecError
from ..core.file_store import PURPOSE, FileObject, Incoming
from ..core.state import AppState, StateDep
from ..http import forms
from ..http.client import share_of
from ..http.errors import CLIENT_DISCONNECTED, RESPONSES, ApiError, unavailable
from ..http.strict import StrictRoute, check_query, place_after
from . import result_files

_FIELDS = {"file", "purpose"}
_MAX_UPLOADS = 100  # at a time; each has a few open files
_STEP = 64 * 1024  # bytes of a step; the slowest upload is in its current step for the longest time
_LEAST_S = 1.0  # duration of a step from which an upload is slow, and makes room for any other
_BUFFERS = 32 * 1024**2  # bytes of all uploads together that are not written yet
_BUFFER = 1024**2  # bytes of one upload, at most
_LINGER_S = 10.0  # time for reading the rest of a refused upload: else its response could be lost


class _Arriving:
    """An upload that is being received."""

    def __init__(self, share: str, deadline: asyncio.Timeout) -> None:
        """`share`: the share of its client."""
        self.share = share
        self._deadline = deadline
        self._since = asyncio.get_running_loop().time()  # when the current step began
        self._in_step = 0  # bytes received in it

    def received(self, size: int) -> None:
        self._in_step += size
        if self._in_step >= _STEP:
            self._in_step, self._since = 0, asyncio.get_running_loop().time()

    @property
    def step_s(self) -> float:
        """Seconds for which it has been receiving its current step."""
        return asyncio.get_running_loop().time() - self._since

    def end(self) -> None:
        self._deadline.reschedule(0)


class Uploads:
    """The uploads that are being received, at most `_MAX_UPLOADS`, divided between clients."""

    def __init__(self) -> None:
        self._arriving: list[_Arriving] = []

    @property
    def buffer(self) -> int:
        """How many bytes an upload collects before it writes them."""
        return min(_BUFFER, _BUFFERS // max(1, len(self._arriving)))

    @asynccontextmanager
    async def one(self, share: str) -> AsyncIterator[_Arriving]:
        """Give an upload a place. Raises ApiError 503 if there is none, or if it loses its place.

        `share`: the share of its client.
        """
        if len(self._arriving) >= _MAX_UPLOADS:
            self._make_room(share)
        try:
            async with asyncio.timeout(None) as deadline:
                arriving = _Arriving(share, deadline)
                self._arriving.append(arriving)
                try:
                    yield arriving
                finally:
                    if arriving in self._arriving:
                        self._arriving.remove(arriving)
        except TimeoutError:
            raise unavailable("the upload made room for another one: try again") from None

    def _make_room(self, share: str) -> None:
        """End the slowest upload of the client with most uploads.

        `share`: the share of the client that needs the place. Raises ApiError 503 if that upload is
        not slow and this client would then have at least as many.
        """
        held = Counter(one.share for one in self._arriving)
        most = max(held.values())
        of_busiest = [one for one in self._arriving if held[one.share] == most]
        slowest = max(of_busiest, key=lambda one: one.step_s)
        if slowest.step_s < _LEAST_S and held[share] + 1 >= most:
            raise unavailable("too many simultaneous uploads: try again in a moment")
        self._arriving.remove(slowest)
        slowest.end()


class _Writer:
    """Writes an arriving file in large parts, in a thread."""

    def __init__(self, file: Incoming, state: AppState, uploads: Uploads) -> None:
        self.file = file
        self._in_thread = state.in_thread
        self._uploads = uploads
        self._parts: list[bytes] = []
        self._size = 0

    async def write(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size >= self._uploads.buffer:
            await self.flush()

    async def flush(self) -> None:
        whole = b"".join(self._parts)
        self._parts, self._size = [], 0
        await self._in_thread(self.file.write, whole)


class _UploadRequest(Request):
    """A request whose form has a file, written below the home while it arrives."""

    def __init__(self, request: Request, state: AppState, uploads: Uploads) -> None:
        super().__init__(request.scope, request.receive)
        self._app_state = state
        self._uploads = uploads
        self._parsed: FormData | None = None

    async def form(self, **_: Any) -> FormData:  # type: ignore[override]
        """Return the form. Its file is an Incoming, which is discarded unless it is kept."""
        if self._parsed is None:
            try:
                self._parsed = await self._receive_form()
            except ApiError as error:
                if error.status == 507:  # the client sends on, and the rest may be long
                    await self._linger()
                # FastAPI lets it through while it reads a form.
                raise HTTPException(error.status, str(error), error.headers) from error
        return self._parsed

    async def _receive_form(self) -> FormData:
        writer: _Writer | None = None

        async def begin(filename: str) -> _Writer:
            nonlocal writer
            file = await self._app_state.in_thread(self._app_state.files.begin, filename)
            writer = _Writer(file, self._app_state, self._uploads)
            name.append(filename)
            return writer

        name: list[str] = []
        try:
            async with self._uploads.one(share_of(self.scope) or "") as arriving:
                pieces = self._pieces(arriving)
                content_type = self.headers.get("content-type", "")
                fields, field = await forms.read(content_type, pieces, begin)
                if writer is None or field is None:
                    return FormData(dict(fields))
                await writer.flush()
        except ClientDisconnect:
            await self._discard(writer)
            raise CLIENT_DISCONNECTED from None
        except BaseException:
            await self._discard(writer)
            raise
        file = UploadFile(cast(BinaryIO, writer.file), filename=name[0])
        return FormData([*fields, (field, file)])

    async def _discard(self, writer: _Writer | None) -> None:
        if writer is not None:
            await self._app_state.in_thread(writer.file.close)

    async def _pieces(self, arriving: _Arriving) -> AsyncIterator[bytes]:
        async for piece in self.stream():
            arriving.received(len(piece))
            yield piece

    async def _linger(self) -> None:
        with suppress(TimeoutError, ClientDisconnect, HTTPException, RuntimeError):
            async with asyncio.timeout(_LINGER_S):
                async for _ in self.stream():
                    pass


class UploadRoute(APIRoute):
    """A route for file uploads: checks the announced size first."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        uploads = Uploads()

        async def handle_upload(request: Request) -> Response:
            check_query(request.query_params, {})
            state: AppState = request.app.state.warmd
            announced = request.headers.get("content-length", "")
            await state.in_thread(state.files.check_room, int(announced or 0))
            return await handle(_UploadRequest(request, state, uploads))

        return handle_upload


router = APIRouter(route_class=StrictRoute, prefix="/v1/files", tags=["files"], responses=RESPONSES)


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


async def upload_file(
    file: UploadFile, state: StateDep, request: Request, purpose: Annotated[str, Form()] = PURPOSE
) -> Any:
    """Store a JSONL, CSV or Parquet file for training; the end of its name says which."""
    names = [name for name, _ in (await request.form()).multi_items()]
    for name in names:
        if name not in _FIELDS:
            raise SpecError(name[:80], "unknown or not supported")
        if names.count(name) > 1:
            raise SpecError(name, "must be given once")
    if purpose != PURPOSE:
        raise SpecError("purpose", f"must be {PURPOSE}, got {purpose[:80]!r}")
    return await state.in_thread(cast(Incoming, file.file).keep)


router.add_api_route(
    "", upload_file, methods=["POST"], response_model=FileObject, route_class_override=UploadRoute
)


@router.get("", response_model=FileList)
async def list_files(
    state: StateDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    purpose: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> Any:
    """List uploaded files: those of `purpose`, newest first unless `order` is asc."""
    found = await state.in_thread(state.files.all)
    found = [file for file in found if purpose in (None, file.purpose)]
    found = found if order == "desc" else found[::-1]
    if after is not None:
        found = found[place_after([file.id for file in found], after) :]
    return {"data": found[:limit], "has_more": len(found) > limit}


@router.get("/{file_id}", response_model=FileObject)
async def retrieve_file(file_id: str, state: StateDep) -> Any:
    """Show a file's name, size and date."""
    if (job_id := result_files.job_of(file_id)) is not None:
        return await state.in_thread(result_files.describe, state.client, job_id)
    return await state.in_thread(state.files.get, file_id)


@router.get("/{file_id}/content", response_class=Response)
async def retrieve_file_content(file_id: str, state: StateDep) -> Response:
    """Return a file's content."""
    if (job_id := result_files.job_of(file_id)) is not None:
        table = await state.in_thread(result_files.content, state.client, job_id)
        return Response(table, media_type="application/octet-stream")
    path = await state.in_thread(state.files.path, file_id)
    return FileResponse(path, media_type="application/octet-stream")


@router.delete("/{file_id}", response_model=FileDeleted)
async def delete_file(file_id: str, state: StateDep) -> Any:
    """Delete a file. A waiting job that uses it will fail."""
    if (job_id := result_files.job_of(file_id)) is not None:
        raise Conflict(f"file_id: is the result file of {job_id}: it goes with the job")
    await state.in_thread(state.files.remove, file_id)
    return {"id": file_id}
