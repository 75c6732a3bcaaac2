"""What each kind does with each key of a record: one table for all kinds and formats.

A key with a meaning in OpenAI's or TRL's formats that warmd does not support yet is refused by its
name: without it a model would be trained on another prompt than the data says. The other keys that
a kind does not read are passed to rewards, or ignored, counted and named. `tools` and
`chat_template_kwargs` belong to a chat: where a record is a text, its kind refuses them. OpenAI's
`parallel_tool_calls` is for kinds that train: no chat template has a word for it, so that all it
can say is whether the messages of the record may have several calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..files import jsonl
from ..files.chats import ARGUMENTS, TOOL_CALLS, TOOLS, Message
from ..files.jsonl import Place

PARALLEL = "parallel_tool_calls"
CHECKED = frozenset((PARALLEL,))  # keys that kinds that train check by `check_parallel`

# Keys that a kind reads. The kinds with rewards pass all other keys to them.
READ: Mapping[str, frozenset[str]] = {
    "sft": frozenset(
        (
            *("prompt", "completion", "messages", "question", "answer", "text"),
            *(TOOLS, ARGUMENTS, PARALLEL),
        )
    ),
    "dpo": frozenset(
        (
            *("prompt", "chosen", "rejected", "input"),
            *("preferred_output", "non_preferred_output"),
            *(TOOLS, ARGUMENTS, PARALLEL),
        )
    ),
    "encode": frozenset(("text", "id")),
    "infer": frozenset(("prompt", "messages", TOOLS, ARGUMENTS)),
    "texts": frozenset(("text",)),  # mlm, and eval of perplexity
}

# Keys that change what a model reads or learns, by OpenAI's and TRL's formats.
_MEANINGFUL = frozenset(
    (
        *("functions", "tool_calls", "function_call", "tool_choice"),
        *(PARALLEL, "response_format"),
        *("images", "image", "audio", "videos", "weight"),
    )
)


def refuse_ignored(
    values: Mapping[str, Any], place: Place, *, reads: frozenset[str] = frozenset()
) -> None:
    """Raise SpecError for a key with a meaning that is not supported. Null and empty are absent.

    `reads`: such keys that the kind reads all the same.
    """
    if _MEANINGFUL.isdisjoint(values):  # nearly all records
        return
    for name in sorted((_MEANINGFUL & values.keys()) - reads):
        value = values[name]
        if value is not None and value not in ("", [], {}):
            raise place.field(name).fault(
                "absent or empty: it is not supported, and leaving it out would change what the "
                "model reads",
                jsonl.kind_of(value),
            )


def check_parallel(
    values: Mapping[str, Any], messages: Iterable[Message] | str, place: Place
) -> None:
    """Raise SpecError if a record allows no parallel calls and its messages have some.

    `messages`: those that may have calls, or the text of a record that is no chat.
    """
    given = values.get(PARALLEL)
    if given is None:
        return
    at = place.field(PARALLEL)
    if isinstance(messages, str):
        raise at.fault("absent for a text: only a chat has calls of functions", "one")
    if not isinstance(given, bool):
        raise at.fault("true or false", jsonl.kind_of(given))
    if not given and any(len(message.get(TOOL_CALLS) or ()) > 1 for message in messages):
        raise at.fault("true for several calls in one message", "false")
