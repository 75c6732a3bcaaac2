"""`/v1/warmd/files/ID/records`: the first records of an uploaded file, and how many it has."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query
from pydantic import BaseModel

from ....jobs.data import sources
from ....jobs.errors import SpecError
from ..core.state import AppState, StateDep
from ..http.errors import RESPONSES
from ..http.hidden import without_paths
from ..http.strict import StrictRoute

router = APIRouter(
    route_class=StrictRoute, prefix="/v1/warmd/files", tags=["files"], responses=RESPONSES
)

_MOST_COLUMNS = 50
_LONGEST = 1000  # characters of a value


class FileRecords(BaseModel):
    """Records of a JSONL, CSV, Parquet or Arrow file.

    `records` are the first ones, with at most 50 columns; what is not text is JSON, and at most
    1,000 characters of a value are shown. `faults` says why some of them are unusable.
    """

    rows: int
    records: list[dict[str, str]]
    faults: list[str]


@router.get("/{file_id}/records", response_model=FileRecords)
async def list_records(
    file_id: str, state: StateDep, limit: Annotated[int, Query(ge=1, le=20)] = 3
) -> Any:
    """Show the first records of a file, and count all of them."""
    return await state.in_data_thread(_read, state, file_id, limit)


def _read(state: AppState, file_id: str, limit: int) -> FileRecords:
    """Raises SpecError for a file that is not in its format, and ApiError 404."""
    found = FileRecords(rows=0, records=[], faults=[])
    for record in sources.records("file_id", str(state.files.path(file_id))):
        found.rows += 1
        if found.rows > limit:
            continue
        try:
            found.records.append(_shown(record.parse()))
        except SpecError as error:
            found.faults.append(without_paths(error.problem))
    return found


def _shown(record: dict[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in list(record.items())[:_MOST_COLUMNS]}


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
