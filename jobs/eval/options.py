"""The options of the eval kind and their checks at submission. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from ...configs.queues import INFER
from ..data import templates
from ..data.options import Content
from ..data.reader import Reading
from ..data.sources import TAKES, located
from ..data.templates import AS_IT_IS, AS_TRAINED
from ..data.trained_prompt import TrainedPrompt
from ..engine.options import MOST_TOKENS, PrecisionSpec, SamplingSpec
from ..environments import tasks
from ..environments.options import EPISODE_LENGTH, EnvironmentSpec
from ..errors import SpecError
from ..models.architectures import check_generates
from ..models.tokenizer_folder import TokenizerFolder
from ..relations import ABOVE_0, GIVEN, Relation, goes_with, is_in, never_with
from ..rewards import problems
from ..rewards.options import RewardsSpec
from ..rewards.prompt_options import PromptsSpec
from ..rewards.prompts import check_chats
from ..spec import option, override
from ..training.options import MOST_ROWS
from . import gsm8k, questions
from .questions import Question

REWARD, GSM8K, GSM8K_COT, CHOICE, PERPLEXITY = TASKS = (
    *("reward", "gsm8k", "gsm8k-cot", "choice", "perplexity"),
)
_VARIANTS = {GSM8K: gsm8k.DIRECT, GSM8K_COT: gsm8k.CHAIN_OF_THOUGHT}
LIKELIHOOD_TASKS = (CHOICE, PERPLEXITY)
_GSM8K_TEST, _GSM8K_TRAIN = "openai/gsm8k:main:test", "openai/gsm8k:main:train"
_MAX_TOKENS = 256
_MOST_REPEATS = 128
_CHECK_S = 1.0  # for counting the tokens of prompts at submission


@dataclass(frozen=True, kw_only=True)
class EvalSpec(PromptsSpec, EnvironmentSpec, PrecisionSpec):
    """Evaluate a model: rewards, environments, agents, GSM8K, multiple choice or perplexity."""

    kind: ClassVar[str] = "eval"
    queue: ClassVar[str] = INFER
    argument: ClassVar[str | None] = "model"
    is_kept: ClassVar[bool] = True
    names_jobs: ClassVar[tuple[str, ...]] = ("against",)
    takes_weights: ClassVar[bool] = True

    relations: ClassVar[tuple[Relation, ...]] = (
        goes_with("template", task=(REWARD, CHOICE)),
        goes_with("reward", "grader", task=REWARD),
        goes_with("examples", when=ABOVE_0, task=(GSM8K, GSM8K_COT)),
        goes_with("examples_dataset", "maj_k", task=(GSM8K, GSM8K_COT)),
        goes_with(
            *("pass_k", "repeats", "max_tokens", "stop", "chat_template"),
            task=(REWARD, GSM8K, GSM8K_COT),
        ),
        goes_with("task", when=is_in(*LIKELIHOOD_TASKS), dataset=GIVEN),
        goes_with("repeats", temperature=ABOVE_0),
        # An episode is opened by its environment or agent.
        never_with(
            *("task", "chat_template", "system"),
            environment=GIVEN,
            agent=GIVEN,
        ),
    )

    task: str = option(
        REWARD,
        "evaluation task; reward: completions scored by reward functions; gsm8k: GSM8K, 5-shot, "
        "as in lm-evaluation-harness; gsm8k-cot: the same, 8-shot with chains of thought; choice: "
        "multiple choice by log-likelihood; perplexity: perplexity of texts",
        group="data",
        choices=TASKS,
    )
    dataset: str | None = option(
        None,
        "JSONL, CSV or Parquet file, folder of them or hub data set (owner/name:config:split) of "
        "records, or arithmetic (built-in problems); for perplexity also text files",
        group="data",
        default_text=f"arithmetic for reward, {_GSM8K_TEST} for gsm8k, with environment or "
        "agent the seeds from 0 to samples - 1",
    )
    samples: int | None = option(
        None,
        "number of questions, from the start of the dataset",
        group="data",
        default_text="all",
        minimum=1,
        maximum=MOST_ROWS,
    )
    examples: int | None = option(
        None,
        "number of few-shot examples before each question",
        group="data",
        default_text="5 for gsm8k, 8 for gsm8k-cot",
        minimum=0,
        maximum=64,
    )
    examples_dataset: str | None = option(
        None,
        "data set from which the few-shot examples of gsm8k are drawn",
        group="data",
        default_text=_GSM8K_TRAIN,
    )

    template: str = override(
        PromptsSpec,
        "template",
        default=AS_TRAINED,
        help=f"prompt template: {templates.HELP}; as-trained: with task reward that of the model's "
        "training, with its chat template and system message; prompt records are used unchanged",
    )

    model: str = option("demo", "warm model to evaluate", group="model")

    reward_timeout: float | None = override(
        RewardsSpec,
        "reward_timeout",
        help="time limit in seconds for your own reward functions per question; they are then "
        "called in a separate process",
        default_text="no limit",
    )

    temperature: float = override(
        SamplingSpec, "temperature", default=0.0, help="sampling temperature (0: greedy)"
    )
    max_tokens: int | None = option(
        None,
        "maximum tokens per completion; with environment, of an episode after its prompt",
        group="sampling",
        default_text=f"{_MAX_TOKENS} (with environment {EPISODE_LENGTH}), or the positions that "
        "the prompt leaves",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    stop: tuple[str, ...] = option(
        (),
        "stop sequence: text that ends a completion and is not part of it; the gsm8k tasks define "
        "theirs",
        group="sampling",
    )
    repeats: int = option(
        1, "completions per question", group="sampling", minimum=1, maximum=_MOST_REPEATS
    )
    seed: int = option(
        42, "random seed of sampling", group="sampling", minimum=0, maximum=2**63 - 1
    )

    pass_k: tuple[int, ...] = option(
        (),
        "k of pass@k: the probability that at least one of k completions is correct (unbiased "
        "estimate from all repeats)",
        group="evaluation",
        minimum=1,
        maximum=_MOST_REPEATS,
    )
    maj_k: tuple[int, ...] = option(
        (),
        "k of maj@k: accuracy of the most frequent answer among the first k completions",
        group="evaluation",
        minimum=1,
        maximum=_MOST_REPEATS,
    )
    against: str | None = option(
        None,
        "eval job on the same questions, with which the answers are compared question by question",
        group="evaluation",
    )

    @property
    def variant(self) -> gsm8k.Variant | None:
        """The prompt format of GSM8K; None for other tasks."""
        return _VARIANTS.get(self.task)

    @property
    def source(self) -> str:
        """The data set."""
        if self.dataset is not None:
            return self.dataset
        if self.played is not None:
            return tasks.SEEDS
        return _GSM8K_TEST if self.variant is not None else problems.ARITHMETIC

    @property
    def num_examples(self) -> int:
        """The solved examples before each question."""
        if self.variant is None:
            return 0
        return self.variant.num_examples if self.examples is None else self.examples

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop sequences of completions."""
        return self.stop or (self.variant.stop if self.variant is not None else ())

    @classmethod
    def of_stored(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        former = {REWARD: templates.MATH, CHOICE: templates.NAMED["qa"]}.get(
            options.get("task", REWARD)
        )
        if former is None:  # a task without a template: earlier versions stored AS_IT_IS
            return {**options, "template": AS_TRAINED}
        return {**options, "template": options.get("template") or former}

    def check(self) -> None:
        super().check()
        if self.template != AS_TRAINED:
            templates.check(self.template)
        if "" in self.stop:
            raise SpecError("stop", "must be text, each, got ''")
        for name in ("pass_k", "maj_k"):
            if (largest := max(getattr(self, name), default=1)) > self.repeats:
                raise SpecError(name, f"must be at most {self.repeats} (repeats), got {largest}")

    @property
    def data_sets(self) -> list[str]:
        """The data set, unless it is built in."""
        return [] if self.source in (problems.ARITHMETIC, tasks.SEEDS) else [self.source]

    def reading(self) -> Reading:
        """Return the rules for reading records, with counts of what is skipped, all 0."""
        return Reading(self.column_names, self.skip_bad_rows)

    def questions(self, reading: Reading | None = None) -> list[Question]:
        """Read the questions, with their final prompts. Raises SpecError."""
        found = self.raw_questions(reading)
        if self.variant is None:
            return found
        texts = [str(question.problem.prompt) for question in found]
        prompts = gsm8k.prompts(self.variant, texts, self._examples(), self.num_examples)
        return [questions.with_prompt(q, text) for q, text in zip(found, prompts, strict=True)]

    def of_data(self, dataset: str) -> Self:
        """Return the spec for a whole data set, without what has no effect on its questions."""
        others: dict[str, Any] = {
            one.name: one.default
            for one in fields(self)
            if one.metadata["group"] in ("model", "sampling", "evaluation")
        }
        return replace(self, **others, dataset=dataset, samples=None, examples=None)

    def raw_questions(self, reading: Reading | None = None) -> list[Question]:
        """Read the questions, without the examples of GSM8K. Raises SpecError."""
        found = self._all_questions(reading or self.reading())
        return questions.taken(found, self.samples, self.source)

    def _all_questions(self, reading: Reading) -> Iterator[Question]:
        if self.played is not None:
            found = tasks.load(
                self.dataset, template=self.template, samples=self.samples, reading=reading
            )
            return questions.of_tasks(self.played[1], found)
        if self.task == PERPLEXITY:
            return questions.documents(self.source, reading)
        if self.task == CHOICE:
            return questions.multiple_choice(self.source, self.template, reading)
        return questions.open_ended(self.source, self.template, reading, check=self.check_problem)

    def as_trained(self, model_settings: Mapping[str, Any] | None) -> Self:
        if self.template != AS_TRAINED or self.task not in (REWARD, CHOICE):
            return self
        prompt: TrainedPrompt | None = (model_settings or {}).get("trained_prompt")
        is_own = self.chat_template or self.system is not None or self.played is not None
        if prompt is None or is_own or self.task != REWARD:
            return replace(self, template=AS_IT_IS)
        return replace(
            self,
            template=prompt.template,
            chat_template=prompt.chat_template,
            system=prompt.system if prompt.chat_template else None,
        )

    def check_problem(self, problem: problems.Problem) -> None:
        if self.variant is None:
            super().check_problem(problem)
            return
        problems.check_inputs(problem, chat_template=self.chat_template)
        assert problem.place is not None
        if problem.answer is None:
            raise problem.place.fault("an object with answer", "one without")
        if not isinstance(problem.prompt, str):
            raise problem.place.fault("an object with question", "a chat")

    def _examples(self) -> list[tuple[str, str]]:
        """The solved examples of GSM8K: all that they are drawn from. Raises SpecError."""
        if not self.num_examples:
            return []
        if self.task == GSM8K_COT and self.examples_dataset is None:
            found = list(gsm8k.COT_EXAMPLES)
        else:
            source = self.examples_dataset or _GSM8K_TRAIN
            read = questions.open_ended(
                source,
                AS_IT_IS,
                Reading(self.column_names),
                check=self.check_problem,
                named_by="examples_dataset",
            )
            found = [(str(q.problem.prompt), str(q.problem.answer)) for q in read]
        if len(found) < self.num_examples:
            raise SpecError("examples", f"must be at most {len(found)}, got {self.num_examples}")
        return found

    def first_prompt(self) -> Content | None:
        return self.first_prompt_of(replace(self, samples=1).questions()[0])

    def first_prompt_of(self, question: Question) -> Content | None:
        """Return the prompt of a question; None where an environment or agent has its own."""
        return None if self.played is not None else self.rendered_prompt(question.problem)

    def cut_at(self, positions: int | None) -> int | None:
        return positions

    def located(self, folder: Path) -> Self:
        """Return the spec with data sets, seen from `folder`, made absolute. Raises SpecError."""
        spec = self
        names = {"dataset": self.source}
        if self.task == GSM8K and self.num_examples:
            names["examples_dataset"] = self.examples_dataset or _GSM8K_TRAIN
        elif self.examples_dataset is not None:
            names["examples_dataset"] = self.examples_dataset
        for name, source in names.items():
            if source not in (problems.ARITHMETIC, tasks.SEEDS):
                changes: dict[str, Any] = {name: located(name, source, folder, TAKES)}
                spec = replace(spec, **changes)
        return spec

    def check_inputs(self, model_settings: Mapping[str, Any] | None) -> None:
        """Check the data, the rewards and the model. Raises SpecError."""
        super().check_inputs(model_settings)
        check_generates(model_settings or {})
        found = self.questions()
        if self.played is not None:
            self.check_played([question.problem for question in found])
        elif self.task == REWARD:
            self.check_rewards([question.problem for question in found])
        if self.chat_template and not (model_settings or {}).get("has_chat_template", True):
            raise SpecError(
                "chat_template",
                f"must go with a chat template, got {self.model}, whose tokenizer has none",
            )

    def check_chats(self, folder: Path) -> None:
        if self.task != REWARD or self.played is not None:
            return
        found = (question.problem for question in self.questions())
        check_chats(found, folder, chat_template=self.chat_template, system=self.system)

    def check_model_files(self, folder: Path) -> str | None:
        """Check the lengths of plain prompts with the model's tokenizer, for at most 1 s.

        The others are checked when they are sent to the model. Raises SpecError.
        """
        files = TokenizerFolder(folder)
        limit = files.positions()
        is_other = self.task in LIKELIHOOD_TASKS or self.played is not None
        if limit is None or self.chat_template or is_other:
            return None
        found = (question.problem for question in self.questions())
        texts = ((one.row, one.prompt) for one in found if isinstance(one.prompt, str))
        longer = files.longer_than(
            limit - (self.max_tokens or 1), texts, until=time.monotonic() + _CHECK_S
        )
        if longer is not None:
            row, length = longer
            raise SpecError(
                "dataset",
                f"the prompt of row {row} has {length} tokens and the model takes {limit} together "
                "with the completion: set fewer examples, or a smaller max_tokens",
            )
        return None
