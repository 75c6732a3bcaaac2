"""A response of `/v1/responses` as it grows: its output items, and the events that tell of them.

OpenAI's streaming events: https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from ..core.answers import Text
from ..core.sampling import usage_of
from ..http.errors import ApiError
from .chat import token_logprobs

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}  # of ids


class ResponseEvents:
    """The events of one response; a `sse.Form`."""

    def __init__(self, job_id: str, response: dict[str, Any]) -> None:
        """`response`: the fields that hold from the beginning.

        Ids follow from the job: a retried request gets the same ones.
        """
        self._job_id = job_id
        self._response = {"id": f"resp_{job_id}", "object": "response", **response}
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # the last item
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []  # of the message, and of tokens before it
        self._waiting: list[dict[str, Any]] = []  # for a message
        self._number = 0  # of the next event

    def begin(self, fingerprint: str | None) -> None:
        """The API has no place for the fingerprint of the model."""

    def opening(self) -> Iterator[bytes]:
        """Yield the events before the first text."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._now("in_progress"))

    def of_text(self, piece: Text) -> Iterator[bytes]:
        """Yield the events of a piece: reasoning, text, then whole calls."""
        if piece.reasoning:
            yield from self._continue("reasoning")
            self._texts.append(piece.reasoning)
            yield self._event("response.reasoning_text.delta", **self._part, delta=piece.reasoning)
        self._waiting += token_logprobs(piece.logprobs or ())
        if piece.text or (self._waiting and self._is_in("message")):
            yield from self._continue("message")
            self._texts.append(piece.text)
            logprobs, self._waiting = self._waiting, []
            self._logprobs += logprobs
            yield self._event(
                "response.output_text.delta", **self._part, delta=piece.text, logprobs=logprobs
            )
        for call in piece.calls:
            yield from self._call(call)

    def of_result(self, result: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the last events: the open item is closed, and the response whole."""
        status = "incomplete" if _is_cut(result) else "completed"
        if not self._output:  # an answer has a message, if an empty one
            yield from self._continue("message")
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._whole(result))

    def of_error(self, error: ApiError) -> Iterator[bytes]:
        """Yield an error, as the API describes it and as OpenAI's clients look for it."""
        detail = error.body["error"]
        named = {name: detail[name] for name in ("code", "message", "param")}
        yield self._event("error", **named, error=detail)

    def of_whole(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole response, of which no event was sent."""
        (choice,) = result["choices"]
        written = Text(
            0,
            choice["text"],
            logprobs=choice.get("logprobs"),
            reasoning=choice.get("reasoning", ""),
            calls=choice.get("calls", ()),
        )
        for _ in (*self.of_text(written), *self.of_result(result)):
            pass
        return self._whole(result)

    def _whole(self, result: Mapping[str, Any]) -> dict[str, Any]:
        usage = usage_of(result)
        is_cut = _is_cut(result)
        return {
            **self._now("incomplete" if is_cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
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
        }

    # --- items ------------------------------------------------------------------------------

    def _continue(self, kind: str) -> Iterator[bytes]:
        """Yield the events that open an item of this type, unless it is the open one."""
        if self._is_in(kind):
            return
        yield from self._close("completed")
        if kind == "message":
            yield from self._open(kind, role="assistant", content=[])
        else:
            yield from self._open(kind, summary=[], content=[])
        yield self._event("response.content_part.added", **self._part, part=self._text_part(""))

    def _is_in(self, kind: str) -> bool:
        """Whether an item of this type is open."""
        return self._is_open and bool(self._output[-1]["type"] == kind)

    def _open(self, kind: str, **fields: Any) -> Iterator[bytes]:
        id = f"{_PREFIXES[kind]}_{self._job_id}_{len(self._output)}"
        self._output.append({"id": id, "type": kind, "status": "in_progress", **fields})
        self._is_open, self._texts, self._logprobs = True, [], []
        yield self._of_item("added")

    def _close(self, status: str) -> Iterator[bytes]:
        """Yield the events that end the open item, if there is one."""
        if not self._is_open:
            return
        item, text = self._output[-1], "".join(self._texts)
        if item["type"] == "message":
            yield self._event(
                "response.output_text.done", **self._part, text=text, logprobs=self._logprobs
            )
        else:
            yield self._event("response.reasoning_text.done", **self._part, text=text)
        part = self._text_part(text)
        yield self._event("response.content_part.done", **self._part, part=part)
        item["content"] = [part]
        yield self._end(status)

    def _call(self, call: Mapping[str, str]) -> Iterator[bytes]:
        yield from self._close("completed")
        name, arguments = call["name"], call["arguments"]
        yield from self._open("function_call", call_id=call["id"], name=name, arguments="")
        place = {name: self._part[name] for name in ("item_id", "output_index")}
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        done = "response.function_call_arguments.done"
        yield self._event(done, **place, name=name, arguments=arguments)
        self._output[-1]["arguments"] = arguments
        yield self._end("completed")

    def _end(self, status: str) -> bytes:
        self._output[-1]["status"] = status
        self._is_open = False
        return self._of_item("done")

    def _text_part(self, text: str) -> dict[str, Any]:
        """Return the one part of the open item, with this text."""
        if self._output[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self._logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    @property
    def _part(self) -> dict[str, Any]:
        """The place of the one part of the open item."""
        index = len(self._output) - 1
        return {"item_id": self._output[-1]["id"], "output_index": index, "content_index": 0}

    # --- events -----------------------------------------------------------------------------

    def _of_item(self, what: str) -> bytes:
        return self._event(
            f"response.output_item.{what}",
            output_index=len(self._output) - 1,
            item=self._output[-1],
        )

    def _now(self, status: str) -> dict[str, Any]:
        """Return the response as it is now."""
        return {
            **self._response,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "usage": None,
        }

    def _event(self, type: str, **fields: Any) -> bytes:
        data = {"type": type, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + type.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


def _is_cut(result: Mapping[str, Any]) -> bool:
    """Whether the limit of tokens ended the completion."""
    (choice,) = result["choices"]
    return bool(choice["finish_reason"] == "length")
