"""multipart/form-data with one file (RFC 7578), whose bytes are handed on as they arrive.

The parser of Starlette spools files to the system's temporary folder, where nothing counts them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from .errors import ApiError

_MOST_FIELDS = 8
_MOST_HEADERS = 16 * 1024  # bytes of the headers of one part
_MOST_TEXT = 64 * 1024  # bytes of all fields together, held in memory


class File(Protocol):
    """Where the bytes of a file go."""

    async def write(self, data: bytes) -> None:
        """Append bytes. Raises ApiError."""


Begin = Callable[[str], Awaitable[File]]  # from the file's name


class _Events:
    """Collects what the parser finds in a piece of a body."""

    def __init__(self) -> None:
        self.fields: list[tuple[str, str]] = []
        self.found: list[str | bytes] = []  # a file's name, and then its bytes
        self.file_field: str | None = None
        self.is_complete = False
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._field: tuple[str, bytearray] | None = None  # None: within the file
        self._text_size = 0

    def on_part_begin(self) -> None:
        self._headers, self._name, self._value = {}, b"", b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._check_headers()

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_headers()

    def on_header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""
        self._check_headers()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        if b"name" not in options:
            raise ApiError(400, "the body must have a name in the header of each part")
        name = options[b"name"].decode(errors="replace")
        if b"filename" not in options:
            self._field = (name, bytearray())
            if len(self.fields) == _MOST_FIELDS:
                raise ApiError(400, f"the body must have at most {_MOST_FIELDS} fields, got more")
            return
        if self.file_field is not None:
            raise ApiError(400, "the body must have one file, got more")
        self._field, self.file_field = None, name
        self.found.append(options[b"filename"].decode(errors="replace"))

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.found.append(data[start:end])
            return
        self._text_size += end - start
        if self._text_size > _MOST_TEXT:
            raise ApiError(400, f"the body must have at most {_MOST_TEXT} bytes of fields")
        self._field[1].extend(data[start:end])

    def on_part_end(self) -> None:
        if self._field is not None:
            name, value = self._field
            self.fields.append((name, value.decode(errors="replace")))

    def on_end(self) -> None:
        self.is_complete = True

    def _check_headers(self) -> None:
        size = len(self._name) + len(self._value) + len(self._headers)
        if size + sum(map(len, self._headers.values())) > _MOST_HEADERS:
            raise ApiError(400, f"the headers of a part must have at most {_MOST_HEADERS} bytes")


async def read(
    content_type: str, pieces: AsyncIterator[bytes], begin: Begin
) -> tuple[list[tuple[str, str]], str | None]:
    """Read a form: return its fields, and the name of the field with the file (None: no file).

    `begin` opens the file, given its name. Raises ApiError, also that of the file.
    """
    _, options = parse_options_header(content_type)
    if b"boundary" not in options:
        raise ApiError(400, "Content-Type: must be multipart/form-data with a boundary")
    events = _Events()
    callbacks = {name: getattr(events, name) for name in vars(_Events) if name.startswith("on_")}
    parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
    file: File | None = None
    try:
        async for piece in pieces:
            parser.write(piece)
            for found in events.found:
                if isinstance(found, str):
                    file = await begin(found)
                else:
                    assert file is not None
                    await file.write(found)
            events.found.clear()
    except MultipartParseError as error:
        raise ApiError(400, f"the body must be multipart/form-data: {error}") from None
    if not events.is_complete:
        raise ApiError(400, "the body must be multipart/form-data: its end is missing")
    return events.fields, events.file_field
