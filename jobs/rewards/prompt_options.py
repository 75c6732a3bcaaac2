"""The options of kinds that score completions of a data set's problems. Imports no torch."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..data import templates
from ..data.options import MOST_CHARACTERS, ChatRecordsSpec, Content
from ..data.templates import AS_IT_IS
from ..files.jsonl import Place
from ..relations import GIVEN, Relation, goes_with
from ..spec import option
from ..user_code.modules import own_modules
from . import problems
from .options import RewardsSpec
from .prompts import chat_of


@dataclass(frozen=True, kw_only=True)
class PromptsSpec(ChatRecordsSpec, RewardsSpec, ABC):
    """How problems become prompts, and how completions are scored."""

    template: str = option(
        AS_IT_IS,
        f"prompt template: {templates.HELP}; prompt records are used unchanged",
        group="data",
        longest=MOST_CHARACTERS,
        names=templates.NAMED,
    )

    relations: ClassVar[tuple[Relation, ...]] = (goes_with("system", chat_template=GIVEN),)

    def content_of(self, values: Mapping[str, Any], place: Place) -> Content:
        problem = problems.problem_of(self.template, values, place)
        self.check_problem(problem)
        return self.rendered_prompt(problem)

    def check_problem(self, problem: problems.Problem) -> None:
        """Check that a problem can be used with these options. Raises SpecError."""
        problems.check_inputs(problem, chat_template=self.chat_template)
        self.check_answer(problem)

    def rendered_prompt(self, problem: problems.Problem) -> Content:
        """Return the prompt of a problem, before the chat template."""
        chat = chat_of(problem, chat_template=self.chat_template, system=self.system)
        if chat is not None:
            return chat
        assert isinstance(problem.prompt, str)
        return problem.prompt

    def check_rewards(self, found: Sequence[problems.Problem], scored: int | None = None) -> None:
        """Check the columns of problems, and the rewards of the first `scored` (None: of all).

        Imports the functions of users. Raises SpecError.
        """
        self.check_columns(found)
        with own_modules([str(Path.cwd())]) if self.has_own_rewards else nullcontext():
            self.reward_functions(found[:scored])
