"""Tokenizes a prompt or a chat with its images, within the context length of the model."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..context import Context, WarmModel
from ..data import templates
from ..engine import images
from ..engine.image_tokens import insert_image_tokens
from ..engine.request import Image
from ..errors import JobFailed
from ..files.chats import Chat
from ..models import chat_templates, image_parts
from ..models.architectures import positions_in
from ..models.chat_templates import ChatTemplate
from ..models.text_length import check_length
from .options import AUTO, MAX_TOKENS, TOKENS, InferSpec

Prompt = str | Chat | tuple[int, ...]  # a text, a chat, or tokens
_MOST_LISTED = 2**18  # tokens of a prompt in a result; a longer context raises it


def encode(spec: InferSpec, warm: WarmModel, prompt: Prompt) -> tuple[list[int], list[Image]]:
    """Return the tokens of a prompt and its images. Raises JobFailed."""
    urls: list[str] = []
    if isinstance(prompt, tuple):
        return list(prompt), []
    question: str | Chat | None = prompt
    if isinstance(prompt, Chat) and not warm.tokenizer.chat_template:
        question = spec.question_of(prompt)
    if isinstance(question, str) and not spec.chat_template:
        given = spec.add_special_tokens
        text = templates.fill(spec.template, question)
        ids = _tokens(warm, text, **({} if given is None else {"add_special_tokens": given}))
    else:
        if not warm.tokenizer.chat_template:
            raise JobFailed(f"chat_template: the tokenizer of {warm.name} has none")
        chat = spec.chat(prompt)
        messages, urls = image_parts.split(chat.messages)
        chat = replace(chat, messages=messages)
        size, limit = chat.num_characters, positions_in(warm.model.config)
        check_length("messages:", size, warm.tokenizer, limit, warm.name)
        template = ChatTemplate.of(warm.tokenizer)
        if spec.reasoning_effort != AUTO:
            chat = chat_templates.with_effort(chat, spec.reasoning_effort, template)
        # The template writes the special tokens itself.
        text = chat_templates.render(
            template, chat, add_generation_prompt=spec.add_generation_prompt
        )
        ids = _tokens(warm, text, add_special_tokens=bool(spec.add_special_tokens))
    if not ids and spec.reply != TOKENS:
        raise JobFailed("prompt: it has no tokens")
    budget = images.Budget(thumbnail=spec.thumbnail, max_pixels=spec.max_pixels)
    return insert_image_tokens(warm, ids, urls, budget)


def room(spec: InferSpec, warm: WarmModel, num_prompt: int) -> int:
    """Return how many tokens a completion may have. Raises JobFailed if too few fit."""
    limit = positions_in(warm.model.config)
    wanted = MAX_TOKENS if spec.max_tokens is None else spec.max_tokens
    if limit is None:
        return wanted
    left = limit - num_prompt
    if left < (1 if spec.max_tokens is None else wanted):
        raise JobFailed(
            f"max_tokens: the prompt has {num_prompt} tokens and {warm.name} takes {limit} "
            f"together with the completion: at most {max(0, left)} are left, got {wanted}"
        )
    return min(wanted, left)


def listed(
    spec: InferSpec, ctx: Context, warm: WarmModel, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    """Return the tokens of prompts, and the texts of prompts that are token ids.

    Each choice has `tokens`, their `token_strs` as the tokenizer spells them, and as its `text` the
    text of given ids, else the ids as JSON. Raises Stopped and JobFailed.
    """
    ctx.check_stop()
    begun = time.perf_counter()
    choices = [_listed(spec, warm, prompt, place) for place, prompt in enumerate(prompts)]
    count = sum(len(choice["tokens"]) for choice in choices)
    ctx.emit("begin", prompt_tokens=count)
    for choice in choices:
        ctx.emit("text", index=choice["index"], text=choice["text"], tokens=0)
    return {
        "choices": choices,
        "usage": {
            "prompt_tokens": count,
            "completion_tokens": 0,
            "total_tokens": count,
            "cached_tokens": 0,
        },
        "timings": {"tokenize_s": round(time.perf_counter() - begun, 6)},
        "max_model_len": positions_in(warm.model.config),
        "model": spec.model,
    }


def _listed(spec: InferSpec, warm: WarmModel, prompt: Prompt, place: int) -> dict[str, Any]:
    tokenizer = warm.tokenizer
    ids, _ = encode(spec, warm, prompt)
    most = max(_MOST_LISTED, positions_in(warm.model.config) or 0)
    if len(ids) > most:
        raise JobFailed(f"prompt: must have at most {most:,} tokens, got {len(ids):,}")
    is_text = not isinstance(prompt, tuple)
    spelled = _spelled(tokenizer, ids)
    if None in spelled:
        wrong = ids[spelled.index(None)] if len(spelled) == len(ids) else max(ids)
        problem = f"[{place}] must be token ids of {warm.name}, got {wrong}, which it has not"
        raise JobFailed(f"prompts: {problem}")
    text = json.dumps(ids) if is_text else tokenizer.decode(ids)
    return {"index": place, "text": text, "tokens": ids, "token_strs": spelled}


def _spelled(tokenizer: Any, ids: list[int]) -> list[str | None]:
    """Return tokens as the tokenizer spells them; None for an id that it has not."""
    try:
        found: list[str | None] = tokenizer.convert_ids_to_tokens(ids)
    except (IndexError, OverflowError):  # of a tokenizer in Python; of an id of more than 32 bits
        return [None]
    return found


def _tokens(warm: WarmModel, text: str, **how: Any) -> list[int]:
    """Tokenize a text. One that is certainly too long is refused first: it would take seconds."""
    check_length("prompt:", len(text), warm.tokenizer, positions_in(warm.model.config), warm.name)
    ids: list[int] = warm.tokenizer(text, **how)["input_ids"]
    return ids
