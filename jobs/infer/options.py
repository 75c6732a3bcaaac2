"""The options of the infer kind, and what is checked of them at submit. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from ...configs.precision import FORMER_NAMES, PRECISIONS
from ..engine import images, json_schemas
from ..errors import SpecError
from ..models.architectures import check_generates
from ..spec import Spec, option, path_of
from . import batch_file, chat_messages, gui_actions

MAX_TOKENS = 256  # of a completion, unless the options say otherwise or less fits
MOST_TOKENS = 2**31  # more than any model has positions, or tokens in its vocabulary
MIN_TEMPERATURE = 1e-3  # that is not greedy: a smaller one makes infinities of differing logits
SOURCES = ("prompt", "messages", "input")


@dataclass(frozen=True, kw_only=True)
class InferSpec(Spec):
    """Every option of an infer job."""

    kind: ClassVar[str] = "infer"
    queue: ClassVar[str] = "infer"
    argument: ClassVar[str | None] = "prompt"

    model: str = option("demo", "name of the warm model that answers")
    # Not `str | None`: the word none is a prompt like any other.
    prompt: str = option("", "text to go on from; instead: messages or input")
    messages: str = option("", "chat to answer: a JSON list of messages, as OpenAI's API has it")
    input: str = option("", "JSONL file whose rows have a prompt or messages; goes with output")
    output: str = option("", "JSONL file for the answers to input: one line a row, in its order")
    chat_template: bool = option(False, "give plain prompts to the tokenizer's chat template")
    system: str = option("", "system message that opens a chat which has none")
    image: tuple[str, ...] = option((), "image file that the prompt is about")
    thumbnail: int | None = option(
        None,
        "pixels of an image's longer side; larger ones are made smaller",
        minimum=28,
        maximum=2**16,
    )
    max_pixels: int | None = option(
        None,
        "of an image as the model sees it, larger ones are made smaller; by default its own",
        minimum=28 * 28,
        maximum=images.MAX_PIXELS,
    )

    max_tokens: int | None = option(
        None,
        f"most tokens of a completion; by default {MAX_TOKENS}, or what the prompt leaves",
        minimum=1,
        maximum=MOST_TOKENS,
    )
    temperature: float = option(
        1.0,
        f"sampling temperature; 0: greedy, always the likeliest token; else at least "
        f"{MIN_TEMPERATURE:g}",
        minimum=0,
        maximum=100,
    )
    top_p: float = option(1.0, "share of probability to sample from", above=0, maximum=1)
    top_k: int = option(
        0, "number of tokens to sample from; 0: all", minimum=0, maximum=MOST_TOKENS
    )
    frequency_penalty: float = option(
        0.0, "taken from a token's logit for each time it was written", minimum=-2, maximum=2
    )
    presence_penalty: float = option(
        0.0, "taken from a token's logit once it was written", minimum=-2, maximum=2
    )
    stop: tuple[str, ...] = option((), "text that ends a completion, and is not part of it")
    json_schema: str = option(
        "", "JSON Schema that completions keep to: a file that holds it, or its text"
    )
    seed: int | None = option(
        None, "of the sampling; by default another each time", minimum=0, maximum=2**63 - 1
    )
    precision: str | None = option(
        None,
        "native: the model's own dtype; bf16: on a CPU where it is measured to be faster; int8: "
        "W8A8 dynamic quantization on a CPU, bf16 on a GPU; by default what the model was loaded "
        "with",
        choices=PRECISIONS,
        former_names=FORMER_NAMES,
    )
    n: int = option(1, "completions per prompt", minimum=1, maximum=128)
    actions: str = option(
        "none",
        "ui-tars: read each completion as a list of a GUI agent's actions",
        choices=gui_actions.FORMATS,
    )
    screen: str = option(
        "", "WIDTHxHEIGHT in pixels, to which actions are scaled; by default the last image's"
    )

    def check(self) -> None:
        super().check()
        given = [name for name in SOURCES if getattr(self, name)]
        if len(given) != 1:
            raise SpecError(
                "prompt",
                f"must be given, or else messages or input, got {' and '.join(given) or 'none'}",
            )
        if self.messages:
            chat_messages.parse(self.messages, "messages")
        if bool(self.input) != bool(self.output):
            raise SpecError("output", "must go with input, got one without the other")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise SpecError(
                "temperature",
                f"must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {self.temperature:g}",
            )
        if "" in self.stop:
            raise SpecError("stop", "must be text, each, got ''")
        if self.screen:
            gui_actions.parse_screen(self.screen)
            if self.actions == "none":
                raise SpecError("screen", "must go with actions, got none")
        if self.image and not self.prompt:
            raise SpecError("image", "must go with a prompt; messages have images of their own")
        if self.system and self.prompt and not (self.chat_template or self.image):
            raise SpecError("system", "must go with chat_template or messages, got a plain prompt")

    def located(self, folder: Path) -> Self:
        """Return the same spec with its paths seen from `folder` made absolute.

        Of a schema's file the text takes its place. Raises SpecError, also when it cannot be read.
        """
        paths: dict[str, Any] = {
            name: str(path_of(name, getattr(self, name), folder))
            for name in ("input", "output")
            if getattr(self, name)
        }
        paths["json_schema"] = json_schemas.text_of(self.json_schema, folder)
        paths["image"] = tuple(str(path_of("image", path, folder)) for path in self.image)
        return replace(self, **paths)

    def check_inputs(self, model_settings: Mapping[str, Any] | None) -> None:
        """Check the model, images, schema, the input's rows, the output's place, lengths.

        `model_settings` may say `has_chat_template`. Raises SpecError.
        """
        super().check_inputs(model_settings)
        config = model_settings or {}
        check_generates(config)
        for path in self.image:
            images.check(path)
        if self.json_schema:
            json_schemas.grammar_of(self.json_schema)
        if self.input:
            batch_file.check(Path(self.input), Path(self.output))
        if model_settings is not None:
            self._check_images(config)
        if not config.get("has_chat_template", True):
            self._check_plain()
        limit = config.get("text_config", config).get("max_position_embeddings")
        if limit is not None and (self.max_tokens or 1) >= limit:
            raise SpecError(
                "max_tokens",
                f"must be less than {limit} (the positions of {self.model}), got {self.max_tokens}",
            )

    def _check_plain(self) -> None:
        for name in ("messages", "chat_template", "image"):
            if getattr(self, name):
                raise SpecError(
                    name,
                    f"must go with a chat template, got {self.model}, whose tokenizer has none",
                )

    def _check_images(self, config: Mapping[str, Any]) -> None:
        if self.image:
            images.check_model(config, "image")
        elif self.messages and chat_messages.has_images(
            chat_messages.parse(self.messages, "messages")
        ):
            images.check_model(config, "messages")
