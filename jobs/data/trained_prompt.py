"""How a training wrote its prompts: stored with the trained model, for those who use it.

A file in the model's folder, next to the tokenizer: what a question is put into before the model
sees it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from ..errors import SpecError
from ..files import records
from ..files.documents import check_regular
from . import templates
from .options import MOST_CHARACTERS
from .templates import AS_IT_IS

FILE = "warmd_prompt.json"
_MOST_BYTES = 1024**2  # of the file
_LONGEST = 60  # characters of a text in a description


@dataclass(frozen=True)
class TrainedPrompt:
    """The template of plain prompts, whether they then were chats, and the chats' system message.

    `system` may be without `chat_template`, where the data had chats.
    """

    template: str = AS_IT_IS
    chat_template: bool = False
    system: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self | None:
        """Return that of a training's options; None if its prompts are used as they are."""
        template = options.get("template") or AS_IT_IS
        found = cls(
            template if templates.changes(template) else AS_IT_IS,
            bool(options.get("chat_template")),
            options.get("system") or None,
        )
        return None if found == cls() else found

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return that of a model's folder; None if it has none. Raises SpecError."""
        path = folder / FILE
        if not path.exists():
            return None
        check_regular("model", path)
        try:
            with path.open("rb") as file:
                prompt = records.decode(file.read(_MOST_BYTES), cls)
            templates.check(prompt.template)
        except (OSError, ValueError, SpecError) as error:
            raise SpecError("model", f"{path}: {error}") from error
        if max(len(prompt.template), len(prompt.system or "")) > MOST_CHARACTERS:
            raise SpecError(
                "model", f"{path}: texts must have at most {MOST_CHARACTERS} characters"
            )
        return prompt

    def write(self, folder: Path) -> None:
        """Write the file into a model's folder."""
        (folder / FILE).write_bytes(orjson.dumps(asdict(self)))

    @property
    def description(self) -> str:
        """What a prompt is put into, in one line: 'template 'Question: …', chat template'."""
        parts = []
        if self.template != AS_IT_IS:
            parts.append(f"template {_short(self.template)}")
        if self.chat_template:
            parts.append("chat template")
        if self.system is not None:
            parts.append(f"system message {_short(self.system)}")
        return ", ".join(parts)


def _short(text: str) -> str:
    return repr(text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…")
