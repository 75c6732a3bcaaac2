"""The infer kind: generate completions for a prompt, a chat, or a file of them.

`options.py` has its options; `engine/` holds the batching engine, which needs torch.
"""

from __future__ import annotations

from typing import Any

from ..context import Context
from ..files.chats import Chat
from ..models import image_parts
from . import chat_messages
from .options import TOKENS, InferSpec, prompt_list


def run(spec: InferSpec, ctx: Context) -> dict[str, Any]:
    """Generate; leave the running batch at the next token when `ctx.stop` is set.

    Returns choices, usage, timings, seed, model and precision; for a file its number of records,
    usage, timings, seed and model; with reply `tokens` as `tokenization.listed`. Raises Stopped and
    JobFailed.
    """
    from . import answering, tokenization

    warm = ctx.models.take(spec.model)
    if spec.input:
        return answering.answer_file(spec, ctx, warm)
    prompts = prompt_list(spec.prompts) if spec.prompts else [_prompt(spec)]
    if spec.reply == TOKENS:
        return tokenization.listed(spec, ctx, warm, prompts)
    return answering.answer_all(spec, ctx, warm, prompts)


def _prompt(spec: InferSpec) -> str | Chat:
    """The plain prompt, or the chat to answer."""
    if spec.messages:
        return Chat(chat_messages.parse(spec.messages, "messages"))
    if not spec.image:
        return spec.prompt
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": image_parts.FILE + path}} for path in spec.image
    ]
    return Chat([{"role": "user", "content": [*parts, {"type": "text", "text": spec.prompt}]}])
