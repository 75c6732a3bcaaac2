"""The options of the infer kind and their checks at submission. Imports no torch."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import orjson

from ...configs.queues import INFER
from ..data import templates
from ..data.options import MOST_CHARACTERS
from ..data.templates import AS_IT_IS, AS_TRAINED
from ..data.trained_prompt import TrainedPrompt
from ..engine import forms, images, json_schemas
from ..engine.options import MOST_TOKENS, PrecisionSpec, SamplingSpec
from ..errors import JobFailed, SpecError
from ..files.chats import ARGUMENTS, TOOLS, Chat, TemplateInputs, of_option
from ..models import gui_actions, image_parts
from ..models.architectures import check_generates, positions_in
from ..models.chat_templates import Refused, unused, with_effort
from ..models.tokenizer_folder import TokenizerFolder
from ..relations import GIVEN, Relation, goes_with, is_in, is_not, never_with
from ..spec import option, override, path_of
from . import batch_file, chat_messages

MAX_TOKENS = 256  # default length of a completion
MIN_TEMPERATURE = 1e-3  # smallest that is not greedy: below it, logits overflow
SOURCES = ("prompt", "messages", "input", "prompts")
MOST_PROMPTS = 1024
MOST_STOP = 1000  # characters of a stop sequence: it is compared at every token
MOST_BIASES = 1024  # tokens of logit_bias
MOST_TOP = 20  # most likely tokens given with logprobs
AUTO = "auto"  # as the chat template has it
EFFORTS = ("none", "minimal", "low", "medium", "high")
MESSAGE = "message"  # a completion with its reasoning and calls apart
TOKENS = "tokens"  # the tokens of the prompt, or the text of its token ids; nothing is generated
NO_CALLS, REQUIRED = "none", "required"  # choices of tools, besides AUTO
_FUNCTION = "function "  # begins the choice of one
_CHECK_S = 1.0  # for counting the tokens of prompts at submission


@dataclass(frozen=True, kw_only=True)
class InferSpec(PrecisionSpec):
    """Generate text from prompts or chats, with images if the model accepts them."""

    kind: ClassVar[str] = "infer"
    queue: ClassVar[str] = INFER
    argument: ClassVar[str | None] = "prompt"
    takes_adapters: ClassVar[bool] = True

    relations: ClassVar[tuple[Relation, ...]] = (
        goes_with("output", input=GIVEN),
        goes_with("input", output=GIVEN),
        goes_with("echo", prompt=GIVEN, prompts=GIVEN),
        never_with("echo", chat_template=GIVEN, image=GIVEN),
        goes_with("max_tokens", when=is_in(0), echo=GIVEN),
        goes_with("screen", actions=is_not("none")),
        goes_with("image", prompt=GIVEN),  # messages have images of their own
        goes_with(
            *("system", TOOLS, ARGUMENTS, "reasoning_effort", "thinking_token_budget"),
            chat_template=GIVEN,
            image=GIVEN,
            messages=GIVEN,
            input=GIVEN,
        ),
        goes_with("reply", when=is_in(MESSAGE), messages=GIVEN),
        goes_with("tool_choice", tools=GIVEN),
        goes_with("parallel_tool_calls", tools=GIVEN),
        goes_with("parallel_tool_calls", reply=is_in(MESSAGE)),
        never_with("actions", when=is_not("none"), reply=is_in(MESSAGE, TOKENS)),
        never_with(
            "reply",
            when=is_in(TOKENS),
            **dict.fromkeys(("input", "echo", "json_schema", "regex"), GIVEN),
        ),
        never_with("template", reply=is_in(TOKENS), image=GIVEN),
        never_with("regex", json_schema=GIVEN, thinking_token_budget=GIVEN),
        never_with("regex", max_tokens=is_in(0)),
        goes_with("add_special_tokens", reply=is_in(TOKENS)),
        goes_with("add_generation_prompt", reply=is_in(TOKENS)),
        goes_with("add_generation_prompt", chat_template=GIVEN, image=GIVEN, messages=GIVEN),
    )

    # Not `str | None`: the word none is a prompt like any other.
    prompt: str = option("", "text to complete; or give messages or input instead", group="data")
    messages: str = option(
        "", "chat to answer: JSON list of messages, as in OpenAI's API", group="data"
    )
    prompts: str = option(
        "",
        "several prompts to complete: JSON list of texts, or of lists of token ids",
        group="data",
    )
    input: str = option("", "JSONL file of records with prompt or messages", group="data")
    output: str = option(
        "",
        "JSONL file for the answers: one record per record of input, in the same order",
        group="data",
    )
    echo: bool = option(
        False,
        "prompt repeated at the start of each completion, with log-probabilities if logprobs is "
        "given",
        group="data",
    )
    chat_template: bool = option(
        False, "chat template of the tokenizer, applied to plain prompts", group="data"
    )
    system: str = option("", "system message for chats that have none", group="data")
    template: str = option(
        AS_TRAINED,
        f"prompt template of plain prompts: {templates.HELP}; as-trained: that of the model's "
        "training, with its chat template and system message",
        group="data",
        longest=MOST_CHARACTERS,
        names=templates.NAMED,
    )
    tools: str = option(
        "",
        "tools that the chat template gets: JSON list as in OpenAI's API, or a file",
        group="data",
    )
    chat_template_kwargs: str = option(
        "",
        "variables of the chat template, such as enable_thinking: JSON object or a file",
        group="data",
    )
    reasoning_effort: str = option(
        AUTO,
        "reasoning effort, by the chat template's own variable; none: no thinking",
        group="data",
        choices=(AUTO, *EFFORTS),
    )
    thinking_token_budget: int | None = option(
        None,
        "thinking-token budget: after so many thinking tokens the end-of-thinking token is forced",
        group="sampling",
        default_text="no limit",
        minimum=0,
        maximum=MOST_TOKENS,
    )
    tool_choice: str = option(
        AUTO,
        "whether tools are called: auto, none (the model gets none), required, or 'function NAME'",
        group="data",
        longest=80,
    )
    parallel_tool_calls: bool = option(
        True,
        "several tool calls in one message; off: what follows the first is left out",
        group="data",
    )
    reply: str = option(
        "text",
        "form of a completion; message: content, reasoning and tool calls apart; tokens: no "
        "completion but the tokens of the prompt, or the text of its token ids",
        group="data",
        choices=("text", MESSAGE, TOKENS),
    )
    add_special_tokens: bool | None = option(
        None,
        "special tokens that the tokenizer adds to a text, such as a begin token",
        group="data",
        default_text="on, but off for chats, whose template writes them",
    )
    add_generation_prompt: bool = option(
        True, "start of the answer at the end of a chat, as the chat template has it", group="data"
    )
    image: tuple[str, ...] = option((), "image file for the prompt", group="data")
    thumbnail: int | None = option(
        None,
        "maximum length of an image's longer side in pixels; larger images are scaled down",
        group="data",
        default_text="unlimited",
        minimum=28,
        maximum=2**16,
    )
    max_pixels: int | None = option(
        None,
        "maximum number of pixels per image; larger images are scaled down",
        group="data",
        default_text="that of the model",
        minimum=28 * 28,
        maximum=images.MAX_PIXELS,
    )
    actions: str = option(
        "none",
        "output format of a GUI agent; ui-tars: each completion is parsed to a list of actions",
        group="data",
        choices=gui_actions.FORMATS,
    )
    screen: str = option(
        "",
        "screen size in pixels, WIDTHxHEIGHT, to which the coordinates of actions are scaled; "
        "empty: the size of the last image",
        group="data",
    )

    model: str = option("demo", "warm model that generates the text", group="model")

    max_tokens: int | None = option(
        None,
        "maximum tokens per completion (0, with echo: the prompt only)",
        group="sampling",
        default_text=f"{MAX_TOKENS}, or the positions that the prompt leaves",
        minimum=0,
        maximum=MOST_TOKENS,
    )
    temperature: float = override(
        SamplingSpec,
        "temperature",
        help=f"sampling temperature (0: greedy; otherwise at least {MIN_TEMPERATURE:g})",
    )
    min_p: float = option(
        0.0,
        "minimum probability of a token, relative to that of the most likely token (min-p)",
        group="sampling",
        minimum=0,
        maximum=1,
    )
    logit_bias: str = option(
        "",
        "logit biases: JSON object of token ids and numbers from -100 to 100, added to the logits",
        group="sampling",
    )
    n: int = option(1, "completions per prompt", group="sampling", minimum=1, maximum=128)
    stop: tuple[str, ...] = option(
        (),
        "stop sequence: text that ends a completion and is not part of it",
        group="sampling",
        longest=MOST_STOP,
    )
    seed: int | None = option(
        None,
        "random seed of sampling",
        group="sampling",
        default_text="random",
        minimum=0,
        maximum=2**63 - 1,
    )
    logprobs: int | None = option(
        None,
        "number of most likely alternatives returned for each token with their log-probabilities "
        "(0: only the token's own)",
        group="sampling",
        default_text="no log-probabilities",
        minimum=0,
        maximum=MOST_TOP,
    )
    token_ids: bool = option(
        False, "token ids of prompts and completions in the result", group="sampling"
    )
    json_schema: str = option(
        "",
        "JSON Schema that completions must match: a file or JSON text",
        group="sampling",
    )
    regex: str = option(
        "",
        "regular expression that completions must match as a whole (syntax of Rust's regex, "
        "without look-around)",
        group="sampling",
    )
    frequency_penalty: float = option(
        0.0,
        "penalty on a token's logit for each earlier occurrence",
        group="sampling",
        minimum=-2,
        maximum=2,
    )
    presence_penalty: float = option(
        0.0,
        "penalty on a token's logit after its first occurrence",
        group="sampling",
        minimum=-2,
        maximum=2,
    )

    def check(self) -> None:
        super().check()
        given = [name for name in SOURCES if getattr(self, name)]
        if len(given) != 1:
            raise SpecError(
                "prompt",
                f"must be given, or else messages, prompts or input, got "
                f"{' and '.join(given) or 'none'}",
            )
        if self.template != AS_TRAINED:
            templates.check(self.template)
        if self.messages:
            chat_messages.parse(self.messages, "messages")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise SpecError(
                "temperature",
                f"must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {self.temperature:g}",
            )
        _ = self.bias  # raises
        if self.prompts:
            prompt_list(self.prompts)
        if "" in self.stop:
            raise SpecError("stop", "must be text, each, got ''")
        if self.screen:
            gui_actions.parse_screen(self.screen)
        if self.regex and self.tools and self.tool_choice != NO_CALLS:
            raise SpecError("regex", "must go without tools, or with tool_choice none")

    def located(self, folder: Path) -> Self:
        """Return the spec with paths, relative to `folder`, made absolute.

        A file of JSON is replaced by its text. Raises SpecError, also for an unreadable file.
        """
        paths: dict[str, Any] = {
            name: str(path_of(name, getattr(self, name), folder))
            for name in ("input", "output")
            if getattr(self, name)
        }
        paths["json_schema"] = json_schemas.text_of("json_schema", self.json_schema, folder)
        for name, takes in ((TOOLS, "a JSON list"), (ARGUMENTS, "a JSON object")):
            paths[name] = json_schemas.text_of(name, getattr(self, name), folder, takes)
        paths["image"] = tuple(str(path_of("image", path, folder)) for path in self.image)
        return replace(self, **paths)

    def as_trained(self, model_settings: Mapping[str, Any] | None) -> Self:
        if self.template != AS_TRAINED or self.image or self.reply == TOKENS:
            return self
        settings = model_settings or {}
        prompt: TrainedPrompt | None = settings.get("trained_prompt")
        if prompt is None or self.chat_template or self.system or self.echo:
            return replace(self, template=AS_IT_IS)
        if self.messages and settings["has_chat_template"]:
            return replace(self, template=AS_IT_IS, system=prompt.system or "")
        return replace(
            self,
            template=prompt.template,
            chat_template=prompt.chat_template,
            system=(prompt.system or "") if prompt.chat_template else "",
        )

    @property
    def prompt_format(self) -> dict[str, Any]:
        """What prompts are put into, for a result: empty if they are used as they are."""
        found = {
            "template": self.template if templates.changes(self.template) else "",
            "chat_template": self.chat_template,
            "system": self.system,
        }
        return {name: value for name, value in found.items() if value}

    @property
    def inputs(self) -> TemplateInputs:
        """The inputs of the chat template that all chats get. Raises SpecError."""
        found = (of_option(name, getattr(self, name)) for name in (TOOLS, ARGUMENTS))
        tools, arguments = found
        return TemplateInputs(tools, arguments or {})

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which at least one is called; [] if the model decides. Raises SpecError."""
        if self.tool_choice in (AUTO, NO_CALLS):
            return []
        tools = self.inputs.tools or []
        if self.reply != MESSAGE:
            raise SpecError("tool_choice", "must go with reply message where calls are forced")
        if self.tool_choice == REQUIRED:
            return tools
        name = self.tool_choice.removeprefix(_FUNCTION)
        found = [tool for tool in tools if tool.get("function", tool)["name"] == name]
        if not self.tool_choice.startswith(_FUNCTION) or not found:
            takes = f"{AUTO}, {NO_CALLS}, {REQUIRED} or '{_FUNCTION}NAME' with the name of a tool"
            raise SpecError("tool_choice", f"must be {takes}, got {self.tool_choice!r}")
        return found[:1]

    def _bound_functions(self) -> Iterator[dict[str, Any]]:
        """Yield the functions whose calls must match their JSON Schemas. Raises SpecError."""
        forced = self.forced_tools
        if self.reply == MESSAGE and self.tool_choice != NO_CALLS:
            for tool in forced or self.inputs.tools or ():
                function = tool.get("function", tool)
                if forced or function.get("strict"):
                    yield function

    def chat(self, prompt: str | Chat) -> Chat:
        """Return a prompt as a chat, with all that the options add to it."""
        if isinstance(prompt, str):
            prompt = Chat([{"role": "user", "content": templates.fill(self.template, prompt)}])
        chat = prompt
        messages = chat_messages.with_system(chat.messages, self.system)
        inputs = chat.inputs.over(self.inputs)
        if self.tool_choice == NO_CALLS:
            inputs = replace(inputs, tools=None)
        return Chat(messages, inputs)

    def check_inputs(self, model_settings: Mapping[str, Any] | None) -> None:
        """Check the model, images, JSON Schemas, input records, output path and lengths.

        `model_settings` may have `has_chat_template`. Raises SpecError.
        """
        super().check_inputs(model_settings)
        config = model_settings or {}
        check_generates(config)
        for path in self.image:
            images.check(path)
        self.check_form()
        if self.input:
            batch_file.check(Path(self.input), Path(self.output), chat_template=self.chat_template)
        _ = self.inputs  # raises
        for function in self._bound_functions():
            json_schemas.check(orjson.dumps(parameters_of(function)).decode(), TOOLS)
        if model_settings is not None:
            self._check_images(config)
        if not config.get("has_chat_template", True):
            self._check_plain()
        limit = positions_in(config)
        if limit is not None and (1 if self.max_tokens is None else self.max_tokens) >= limit:
            raise SpecError(
                "max_tokens",
                f"must be less than {limit} (the positions of {self.model}), got {self.max_tokens}",
            )

    @property
    def has_form(self) -> bool:
        """Whether completions are constrained by a schema or an expression."""
        return bool(self.json_schema or self.regex)

    def check_form(self) -> None:
        """Check the schema or expression that completions must match. Raises SpecError."""
        forms.check(json_schema=self.json_schema, regex=self.regex)

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """Token ids and logit biases. Raises SpecError."""
        return biases(self.logit_bias)

    def check_completions(self, most: int) -> None:
        """Check the number of prompts times n; files are answered a few records at a time."""
        count = len(prompt_list(self.prompts)) if self.prompts else 1
        if count > most:
            raise SpecError("prompts", f"must be at most {most} (max_completions), got {count}")
        if self.n * count > most:
            raise SpecError(
                "n",
                f"must be at most {most // count} with {count} prompt{'s' * (count > 1)} ({most} "
                f"completions of one request: max_completions), got {self.n}",
            )

    def check_model_files(self, folder: Path) -> str | None:
        """Check the lengths of plain prompts with the model's tokenizer, for at most 1 s.

        Those of chats are checked by the job, and those of a file there fail alone. Raises
        SpecError.
        """
        files = TokenizerFolder(folder)
        limit = files.positions()
        if limit is None or self.chat_template or self.image or self.reply == TOKENS:
            return None
        room = limit - (1 if self.max_tokens is None else self.max_tokens)
        source = "prompts" if self.prompts else "prompt"
        prompts = prompt_list(self.prompts) if self.prompts else [self.prompt]
        texts = [
            (place, templates.fill(self.template, one))
            for place, one in enumerate(prompts)
            if isinstance(one, str)
        ]
        counts = [(place, len(one)) for place, one in enumerate(prompts) if isinstance(one, tuple)]
        longer: tuple[int, int | str] | None = files.longer_than(
            room, texts, until=time.monotonic() + _CHECK_S
        )
        longer = longer or next((one for one in counts if one[1] > room), None)
        if longer is None:
            return None
        place = f"[{longer[0]}] " if self.prompts else ""
        raise SpecError(
            source,
            f"{place}must have at most {room} tokens ({self.model} takes {limit} together with the "
            f"completion), got {longer[1]}",
        )

    def check_chats(self, folder: Path) -> None:
        if self.messages:
            chat = self.chat(Chat(chat_messages.parse(self.messages, "messages")))
        else:
            chat = Chat([], self.inputs)
        if not chat.parts and self.reasoning_effort == AUTO:  # nearly all requests
            return
        template = TokenizerFolder(folder).chat_template()
        if template is None:
            return
        try:
            if self.reasoning_effort != AUTO:
                chat = with_effort(chat, self.reasoning_effort, template)
            found = unused(template, chat.parts)
        except JobFailed as error:
            if isinstance(error.__cause__, Refused):
                raise SpecError("reasoning_effort", str(error.__cause__)) from None
            return  # the template fails: the job reports it
        if found is not None:
            raise SpecError(*found)

    def question_of(self, chat: Chat) -> str | None:
        """Return the question of a chat of one user message of text, for `template`; else None.

        None, too, where an option needs a chat template.
        """
        content = chat.messages[0].get("content") if len(chat.messages) == 1 else None
        is_question = isinstance(content, str) and chat.messages[0]["role"] == "user"
        needs_chat = (
            chat.inputs.over(self.inputs)
            or self.system
            or self.reasoning_effort != AUTO
            or self.thinking_token_budget is not None
            or not self.add_generation_prompt
        )
        is_plain = templates.changes(self.template) and not needs_chat
        return content if is_question and is_plain else None

    def _check_plain(self) -> None:
        if self.messages and templates.changes(self.template):
            if self.question_of(Chat(chat_messages.parse(self.messages, "messages"))) is None:
                raise SpecError(
                    "messages",
                    "must be one user message of text, without tools and options of a chat "
                    f"template: the tokenizer of {self.model} has none, and the template that it "
                    "was trained with takes one question",
                )
            return
        for name in ("messages", "chat_template", "image"):
            if getattr(self, name):
                raise SpecError(
                    name,
                    f"must go with a chat template, got {self.model}, whose tokenizer has none",
                )

    def _check_images(self, config: Mapping[str, Any]) -> None:
        if self.image:
            images.check_model(config, "image")
        elif self.messages and image_parts.has_images(
            chat_messages.parse(self.messages, "messages")
        ):
            images.check_model(config, "messages")


def biases(text: str) -> tuple[tuple[int, float], ...]:
    """Return the token ids and logit biases of `logit_bias`. Raises SpecError."""
    if not text:
        return ()
    problem = f'must be a JSON object such as {{"42": -100}}, got {text[:60]!r}'
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise SpecError("logit_bias", f"{problem}: {error}") from None
    if not isinstance(given, dict) or len(given) > MOST_BIASES:
        raise SpecError("logit_bias", f"{problem} (at most {MOST_BIASES} tokens)")
    for token, value in given.items():
        if not re.fullmatch("[0-9]{1,9}", token):
            raise SpecError("logit_bias", f"must have token ids as keys, got {token[:40]!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 100:
            raise SpecError("logit_bias", f"{token}: must be from -100 to 100, got {value!r:.40}")
    # By number: "7" and "07" are one token.
    found = {int(token): float(value) for token, value in given.items()}
    if len(found) < len(given):
        raise SpecError("logit_bias", "must name each token once, got one in two spellings")
    return tuple(sorted(found.items()))


def parameters_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments; without one, an object without any."""
    schema = function.get("parameters")
    empty = {"type": "object", "properties": {}, "additionalProperties": False}
    return empty if not schema else {"type": "object", **schema}


def prompt_list(text: str) -> list[str | tuple[int, ...]]:
    """Return the prompts of a JSON list: texts, or tuples of token ids. Raises SpecError."""
    try:
        items = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise SpecError("prompts", f"must be a JSON list, got {text[:60]!r}: {error}") from None
    if not isinstance(items, list) or not 1 <= len(items) <= MOST_PROMPTS:
        got = f"{len(items)}" if isinstance(items, list) else type(items).__name__
        raise SpecError("prompts", f"must be a JSON list of 1 to {MOST_PROMPTS}, got {got}")
    return [_prompt(item, place) for place, item in enumerate(items)]


def _prompt(item: Any, place: int) -> str | tuple[int, ...]:
    if isinstance(item, str) and item:
        return item
    if isinstance(item, list) and item and all(type(token) is int and token >= 0 for token in item):
        return tuple(item)
    raise SpecError("prompts", f"[{place}] must be a text or token ids, not empty, got another")
