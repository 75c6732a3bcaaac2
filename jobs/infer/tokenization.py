"""Tokenizes a prompt or a chat with its images, within the context length of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..context import WarmModel
from ..engine import images
from ..engine.image_tokens import insert_image_tokens
from ..engine.request import Image
from ..errors import JobFailed
from ..files.chats import Chat
from ..models import chat_templates
from ..models.architectures import positions_in
from ..models.chat_templates import ChatTemplate
from ..models.text_length import check_length
from . import chat_messages
from .options import AUTO, MAX_TOKENS, InferSpec

Prompt = str | Chat | tuple[int, ...]  # a text, a chat, or tokens


def encode(spec: InferSpec, warm: WarmModel, prompt: Prompt) -> tuple[list[int], list[Image]]:
    """Return the tokens of a prompt and its images. Raises JobFailed."""
    urls: list[str] = []
    if isinstance(prompt, tuple):
        return list(prompt), []
    if isinstance(prompt, str) and not spec.chat_template:
        ids = _tokens(warm, prompt)
    else:
        if not warm.tokenizer.chat_template:
            raise JobFailed(f"chat_template: the tokenizer of {warm.name} has none")
        chat = spec.chat(prompt)
        messages, urls = chat_messages.split(chat.messages)
        chat = replace(chat, messages=messages)
        size, limit = chat.num_characters, positions_in(warm.model.config)
        check_length("messages:", size, warm.tokenizer, limit, warm.name)
        template = ChatTemplate.of(warm.tokenizer)
        if spec.reasoning_effort != AUTO:
            chat = chat_templates.with_effort(chat, spec.reasoning_effort, template)
        # The template writes the special tokens itself.
        text = chat_templates.render(template, chat)
        ids = _tokens(warm, text, add_special_tokens=False)
    if not ids:
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


def _tokens(warm: WarmModel, text: str, **how: Any) -> list[int]:
    """Tokenize a text. One that is certainly too long is refused first: it would take seconds."""
    check_length("prompt:", len(text), warm.tokenizer, positions_in(warm.model.config), warm.name)
    ids: list[int] = warm.tokenizer(text, **how)["input_ids"]
    return ids
