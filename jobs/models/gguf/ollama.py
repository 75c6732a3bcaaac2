"""The Modelfile with which Ollama takes a GGUF file: where it is, its chat template, its end.

Ollama has Go templates. One is written where a model's template only puts texts around messages,
which is found by rendering chats; others are left to Ollama, which knows some by their source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from ...errors import JobFailed
from ...files.chats import Chat
from ..chat_templates import ChatTemplate, render

_CHATS = (  # roles of messages: what is found in some of them must hold for all
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
)


@dataclass(frozen=True)
class _Frames:
    """What a template writes around messages."""

    begin: str  # of a chat without a system message
    around: dict[str, tuple[str, str]]  # by role
    answer: str  # begin of the answer

    def text(self, roles: tuple[str, ...]) -> str:
        """Return a chat with the contents of `_chat`."""
        parts = [] if roles[0] == "system" else [self.begin]
        for number, role in enumerate(roles):
            before, behind = self.around[role]
            parts += [before, _content(number), behind]
        return "".join([*parts, self.answer])


def modelfile(source: str, template: ChatTemplate | None, ends: list[str], bos: str | None) -> str:
    """Return the content of a Modelfile.

    `source`: its first lines, FROM and perhaps ADAPTER. `ends`: the texts of end tokens. `bos`: the
    text of the token that llama.cpp itself puts before each text.
    """
    lines = [source]
    frames = None if template is None else _frames(template)
    if frames is not None and (go := _go_template(frames, bos or "")) is not None:
        lines.append(f'TEMPLATE """{go}"""')
    elif template is not None:
        lines.append("# The chat template in the GGUF file is more than texts around messages.")
    lines += [f'PARAMETER stop "{end}"' for end in ends if '"' not in end]
    return "\n".join(lines) + "\n"


def _content(number: int) -> str:
    return f"content{number}of"


def _chat(roles: tuple[str, ...]) -> Chat:
    return Chat([{"role": role, "content": _content(i)} for i, role in enumerate(roles)])


def _frames(template: ChatTemplate) -> _Frames | None:
    """Return the texts around messages; None for a template that does more."""
    rendered = partial(render, template)
    try:
        whole = rendered(_chat(("system", "user", "assistant", "user")))
        alone = rendered(_chat(("user",)), add_generation_prompt=False)
        answered = rendered(_chat(("user", "assistant")), add_generation_prompt=False)
        after_user = alone.rpartition(_content(0))[2]
        answer = rendered(_chat(("user",))).removeprefix(alone)
        after_answer = answered.rpartition(_content(1))[2]
        places = [whole.index(_content(number)) for number in range(4)]
        between = [
            whole[first + len(_content(number)) : second]
            for number, (first, second) in enumerate(pairwise(places))
        ]
        before_user = between[2].removeprefix(after_answer)
        found = _Frames(
            begin=alone.partition(_content(0))[0].removesuffix(before_user),
            around={
                "system": (whole[: places[0]], between[0].removesuffix(before_user)),
                "user": (before_user, after_user),
                "assistant": (between[1].removeprefix(after_user), after_answer),
            },
            answer=answer,
        )
        holds = all(rendered(_chat(roles)) == found.text(roles) for roles in _CHATS)
    except (JobFailed, ValueError):  # it refuses such a chat, or changes its contents
        return None
    return found if holds else None


def _go_template(frames: _Frames, bos: str) -> str | None:
    """Return the template in Go; None for texts that a Modelfile cannot hold."""
    begin = frames.begin.removeprefix(bos)
    before_system, after_system = frames.around["system"]
    around = frames.around | {"system": (before_system.removeprefix(bos), after_system)}
    texts = [begin, frames.answer, *(text for pair in around.values() for text in pair)]
    if any('"""' in text for text in texts):
        return None
    parts = [f"{{{{ if not .System }}}}{_literal(begin)}{{{{ end }}}}"] if begin else []
    parts.append("{{ range .Messages }}")
    for role, (before, behind) in around.items():
        text = f"{_literal(before)}{{{{ .Content }}}}{_literal(behind)}"
        parts.append(f'{{{{ if eq .Role "{role}" }}}}{text}{{{{ end }}}}')
    return "".join([*parts, "{{ end }}", _literal(frames.answer)])


def _literal(text: str) -> str:
    return text.replace("{{", '{{ "{{" }}')
