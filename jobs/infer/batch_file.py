"""The input file of prompts and the output file of answers, from which a killed job resumes.

Answers are appended in the order of the input and flushed to disk. A line left incomplete by a
crash is removed before the next write, so that the file always holds complete answers to the first
records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import orjson

from ..data import keys, templates
from ..data.reader import Reader, Reading
from ..data.templates import AS_IT_IS
from ..errors import JobFailed, SpecError
from ..files import journal, jsonl
from ..files.chats import Chat, inputs_of, refuse_inputs
from ..files.documents import check_regular
from ..files.journal import Journal
from ..files.jsonl import Place
from ..models import image_parts

_TAKES = "a file of records (JSONL, CSV, Parquet or Arrow)"


def read(
    path: Path,
    reading: Reading | None = None,
    *,
    chat_template: bool = False,
    template: str = AS_IT_IS,
) -> Iterator[str | Chat]:
    """Yield the prompt of every record: text, or a chat. Raises SpecError.

    `reading`: the record reader's options, and its counters of blank lines and ignored columns.
    `chat_template`: whether texts become chats; `template`: of those with inputs of it.
    """
    if path.is_dir():  # answers have numbers of records; the order of its files may change
        raise SpecError("input", f"must be {_TAKES}, got {path}: a folder")
    prompt = partial(_prompt, chat_template=chat_template, template=template)
    reader = Reader(prompt, reading or Reading(), keys.READ["infer"])
    return reader.rows("input", str(path), _TAKES)


def check(source: Path, target: Path, *, chat_template: bool = False) -> None:
    """Check that all records are valid and the output can be created. Raises SpecError."""
    check_regular("input", source)
    for _ in read(source, chat_template=chat_template):
        pass
    if not target.parent.is_dir():
        raise SpecError("output", f"must be in a folder that exists, got {target}")
    if target.exists():
        raise SpecError(
            "output",
            f"must be a new file, got {target}, which exists: resume its job, or remove it",
        )


def _prompt(
    values: Mapping[str, Any], place: Place, *, chat_template: bool, template: str
) -> str | Chat:
    keys.refuse_ignored(values, place)
    inputs = inputs_of(values, place)
    if "messages" in values:
        return Chat(image_parts.read(values["messages"], place.field("messages")), inputs)
    if "prompt" not in values:
        raise place.fault("an object with a prompt or messages", jsonl.keys_of(dict(values)))
    prompt = values["prompt"]
    if not jsonl.is_text(prompt) or not prompt:
        raise place.field("prompt").fault(
            "text", "an empty one" if prompt == "" else jsonl.kind_of(prompt)
        )
    if not inputs:
        return prompt
    if not chat_template:
        refuse_inputs(inputs, place)
    return Chat([{"role": "user", "content": templates.fill(template, prompt)}], inputs)


class Answers:
    """The output file of a job, which begins with its first line: none is left if there is none.

    `done`: records that it already holds, `failed` of them with an error. A line is {"row": N,
    "job": ID, "choices": […], "usage": {…}}, or {"row": N, "job": ID, "error": {"message": TEXT}}
    for a record that cannot be completed. Raises JobFailed if it is the output of another job.
    """

    def __init__(self, path: Path, job_id: str) -> None:
        self._job_id = job_id
        self._path = path
        self._file: Journal | None = None  # opened by the first line
        self.done = self.failed = self._kept = 0
        if not path.exists():
            return
        for row, end in journal.lines(path):
            self.done += 1
            if (row.get("job"), row.get("row")) != (job_id, self.done):
                raise JobFailed(f"output: line {self.done} of {path} is not of this job")
            self.failed += "error" in row
            self._kept = end
        if not self.done and not journal.begins_with(path, self._line({})[:-2]):
            raise JobFailed(f"output: line 1 of {path} is not of this job")
        self._open().close()  # without a line that is incomplete

    def _line(self, answer: dict[str, Any]) -> bytes:
        return orjson.dumps({"row": self.done + 1, "job": self._job_id, **answer}) + b"\n"

    def append(self, answer: dict[str, Any]) -> None:
        """Append the answer to the next record; durable on return.

        Raises OSError without an effect.
        """
        self._file = self._file or self._open()
        self._file.write(self._line(answer), is_durable=True)
        self.done += 1

    def _open(self) -> Journal:
        return Journal(self._path, self._kept, is_users=True)

    def append_error(self, message: str) -> None:
        """Append an error object for the next record."""
        self.append({"error": {"message": message}})
        self.failed += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is None and kind is None:
            self._file = self._open()  # an input without records
        try:
            if self._file is not None:
                self._file.close()
        finally:
            if kind is not None and self._path.exists() and not self._path.stat().st_size:
                self._path.unlink()
