"""Builds a response of `/v1/responses` from a job's text: output items, and streaming events.

OpenAI's streaming events: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from ..core.answers import Text, prompt_format_of
from ..core.sampling import usage_of
from ..http.errors import ApiError
from .chat import token_logprobs

Event = tuple[str, dict[str, Any]]  # type and fields

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # of ids


class ResponseEvents:
    """One response as it grows. Implements `sse.Form`."""

    def __init__(self, job_id: str, response: dict[str, Any]) -> None:
        """`response`: the fields that are known at once.

        Ids are derived from the job's: a retried request gets the same ones.
        """
        self._job_id = job_id
        self._response = {"id": f"resp_{job_id}", "object": "response", **response}
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item is incomplete
        self._texts: list[str] = []  # the open item's text
        self._logprobs: list[dict[str, Any]] = []  # the open message's log-probabilities
        self._waiting: list[dict[str, Any]] = []  # log-probabilities for the next message event
        self._number = 0  # sequence number of the next event

    def begin(self, fingerprint: str | None) -> None:
        """The API has no field for the fingerprint of the model."""

    def opening(self) -> Iterator[bytes]:
        """Yield the frames before the first text."""
        for kind in ("created", "in_progress"):
            yield self._frame(f"response.{kind}", {"response": self._now("in_progress")})

    def of_text(self, piece: Text) -> Iterator[bytes]:
        """Yield the frames of a piece: reasoning, text, then whole calls."""
        for kind, fields in self._add(piece):
            yield self._frame(kind, fields)

    def of_result(self, result: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the last frames: the end of the open item, and the whole response."""
        for kind, fields in self._end(result):
            yield self._frame(kind, fields)

    def of_error(self, error: ApiError) -> Iterator[bytes]:
        """Yield an error frame: the API's fields, and `error`, which OpenAI's clients look for."""
        detail = error.body["error"]
        named = {name: detail[name] for name in ("code", "message", "param")}
        yield self._frame("error", {**named, "error": detail})

    def of_whole(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response of a request that is not streamed."""
        (choice,) = result["choices"]
        written = Text(
            0,
            choice["text"],
            logprobs=choice.get("logprobs"),
            reasoning=choice.get("reasoning", ""),
            calls=choice.get("calls", ()),
        )
        *_, (_, last) = (*self._add(written), *self._end(result))
        response: dict[str, Any] = last["response"]
        return response

    def _add(self, piece: Text) -> Iterator[Event]:
        if piece.reasoning:
            yield from self._continue("reasoning")
            self._texts.append(piece.reasoning)
            yield self._delta("response.reasoning_text.delta", piece.reasoning)
        self._waiting += token_logprobs(piece.logprobs or ())
        if piece.text or (self._waiting and self._is_in("message")):
            yield from self._continue("message")
            self._texts.append(piece.text)
            logprobs, self._waiting = self._waiting, []
            self._logprobs += logprobs
            yield self._delta("response.output_text.delta", piece.text, logprobs=logprobs)
        for call in piece.calls:
            yield from self._call(call)

    def _end(self, result: Mapping[str, Any]) -> Iterator[Event]:
        status = "incomplete" if _is_cut(result) else "completed"
        if not self._output:  # an empty answer is an empty message
            yield from self._continue("message")
        yield from self._close(status)
        yield f"response.{status}", {"response": self._whole(result, status)}

    def _whole(self, result: Mapping[str, Any], status: str) -> dict[str, Any]:
        usage = usage_of(result)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._now(status),
            "incomplete_details": reason,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                # Workers of an earlier version do not count them.
                "output_tokens_details": usage.get(
                    "completion_tokens_details", {"reasoning_tokens": 0}
                ),
                "total_tokens": usage["total_tokens"],
            },
            "timings": result["timings"],
            **prompt_format_of(result),
        }

    # --- items ------------------------------------------------------------------------------

    def _continue(self, kind: str) -> Iterator[Event]:
        """Open an item of this type, unless the open one is of it; yield the events."""
        if self._is_in(kind):
            return
        yield from self._close("completed")
        fields: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield self._open(kind, **fields, content=[])
        yield "response.content_part.added", {**self._place, "part": self._text_part("")}

    def _is_in(self, kind: str) -> bool:
        """Whether an item of this type is open."""
        return self._is_open and bool(self._output[-1]["type"] == kind)

    def _open(self, kind: str, **fields: Any) -> Event:
        id = f"{_PREFIXES[kind]}_{self._job_id}_{len(self._output)}"
        self._output.append({"id": id, "type": kind, "status": "in_progress", **fields})
        self._is_open, self._texts, self._logprobs = True, [], []
        return self._item_event("added")

    def _close(self, status: str) -> Iterator[Event]:
        """End the open item, if there is one; yield the events."""
        if not self._is_open:
            return
        item, text = self._output[-1], "".join(self._texts)
        if item["type"] == "message":
            done = {**self._place, "text": text, "logprobs": self._logprobs}
            yield "response.output_text.done", done
        else:
            yield "response.reasoning_text.done", {**self._place, "text": text}
        part = self._text_part(text)
        yield "response.content_part.done", {**self._place, "part": part}
        item["content"] = [part]
        yield self._done(status)

    def _call(self, call: Mapping[str, str]) -> Iterator[Event]:
        yield from self._close("completed")
        name, arguments = call["name"], call["arguments"]
        yield self._open("function_call", call_id=call["id"], name=name, arguments="")
        place = {field: self._place[field] for field in ("item_id", "output_index")}
        yield "response.function_call_arguments.delta", {**place, "delta": arguments}
        done = {**place, "name": name, "arguments": arguments}
        yield "response.function_call_arguments.done", done
        self._output[-1]["arguments"] = arguments
        yield self._done("completed")

    def _done(self, status: str) -> Event:
        self._output[-1]["status"] = status
        self._is_open = False
        return self._item_event("done")

    def _text_part(self, text: str) -> dict[str, Any]:
        """Return the only content part of the open item, with this text."""
        if self._output[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    @property
    def _place(self) -> dict[str, Any]:
        """The fields that name the only content part of the last item."""
        index = len(self._output) - 1
        return {"item_id": self._output[-1]["id"], "output_index": index, "content_index": 0}

    def _delta(self, kind: str, delta: str, **fields: Any) -> Event:
        return kind, {**self._place, "delta": delta, **fields}

    def _item_event(self, what: str) -> Event:
        fields = {"output_index": len(self._output) - 1, "item": self._output[-1]}
        return f"response.output_item.{what}", fields

    def _now(self, status: str) -> dict[str, Any]:
        """Return the response with its items so far."""
        return {
            **self._response,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "usage": None,
        }

    def _frame(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """Return a server-sent event. At once: later events change the items in its fields."""
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def _is_cut(result: Mapping[str, Any]) -> bool:
    """Whether the completion ended at the token limit."""
    (choice,) = result["choices"]
    return bool(choice["finish_reason"] == "length")
