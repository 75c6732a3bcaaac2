"""The SFT kind: supervised fine-tuning of a decoder.

`options.py` has its options, `dataset.py` the rows and their tokens, `task.py` the loss, which
needs torch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..context import Context, WarmModel
from ..errors import JobFailed
from ..files.chats import Chat
from ..models import chat_templates
from ..models.architectures import check_can_generate
from ..models.chat_templates import ChatTemplate
from ..sequences.padding import check_padding
from ..training import row_job
from ..training.lengths import most_tokens_of_a_row
from ..training.tokens import Examples
from .dataset import Example, Tokenization
from .options import SftSpec
from .training_templates import NOT_MARKED

if TYPE_CHECKING:
    from trl.trainer.sft_config import SFTConfig

    from ..training.loop import Training
    from .task import Supervised


def run(spec: SftSpec, ctx: Context) -> dict[str, Any]:
    """Train until done or `ctx.stop`; resume from the latest checkpoint when there is one.

    Returns steps, loss and token accuracy on held-out rows before and after (None without any),
    the folder of the model and the last step's metrics. Raises Stopped and JobFailed.
    """
    checkpoint = ctx.checkpoints.latest()
    begun = time.perf_counter()
    warm = ctx.models.take(spec.model)
    check_can_generate(warm.model)
    if warm.tokenizer.eos_token is None:
        raise JobFailed(f"model: the tokenizer of {spec.model} has no end-of-sequence token")
    rows = row_job.load_rows(spec, ctx)
    how = tokenization_of(spec, warm, rows.has_chats)
    check_padding(warm)
    examples, held_out = row_job.encode(spec, ctx, rows, how, warm, Example, checkpoint)
    if spec.assistant_only_loss and checkpoint is None and not _learns_to_stop(how):
        ctx.emit(
            "warning",
            message="assistant_only_loss: the chat template does not mark the end-of-turn token as "
            "what the assistant says: the model may not learn to stop",
        )
    data_done = time.perf_counter()
    steps = row_job.planned_steps(spec, ctx, examples, checkpoint)
    task, training = training_of(spec, ctx, warm, steps, examples, held_out, rows.fingerprint)
    return row_job.run_training(
        spec,
        ctx,
        rows,
        training,
        checkpoint,
        most_tokens=task.most_tokens,
        measured=("loss", "mean_token_accuracy"),
        max_length=how.max_length,
        data_s=data_done - begun,
        trainer_s=time.perf_counter() - data_done,
    )


def tokenization_of(spec: SftSpec, warm: WarmModel, has_chats: bool) -> Tokenization:
    return Tokenization(
        tokenizer=warm.tokenizer,
        max_length=most_tokens_of_a_row(spec.max_length, warm.model, spec.model),
        completion_only_loss=spec.completion_only_loss,
        assistant_only_loss=spec.assistant_only_loss,
        training_template=(
            _training_template(warm.tokenizer) if spec.assistant_only_loss and has_chats else None
        ),
    )


def _training_template(tokenizer: Any) -> str | None:
    """Return TRL's variant of a known chat template that marks the assistant; None: its own."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if not tokenizer.chat_template or has_generation_markers(tokenizer.chat_template):
        return None
    # TRL renders without limits.
    chat_templates.render(ChatTemplate.of(tokenizer), Chat([{"role": "user", "content": "a"}]))
    try:
        found: str | None = get_training_chat_template(tokenizer)
    except Exception as error:  # it renders the template, which can raise anything
        raise JobFailed(f"assistant_only_loss: {NOT_MARKED}") from error
    return found


def _learns_to_stop(how: Tokenization) -> bool:
    """Whether the token that ends a turn of the assistant is among those with a loss."""
    from trl.chat_template_utils import is_chat_template_stop_token_trained

    template = ChatTemplate.of(how.tokenizer)
    if how.training_template is not None:
        template = template.replaced(how.training_template)
    turns = [{"role": role, "content": "dummy"} for role in ("user", "assistant", "user")]
    try:
        chat_templates.render(template, Chat(turns))  # TRL renders them without limits
    except JobFailed:
        return True  # not known
    found: bool = is_chat_template_stop_token_trained(how.tokenizer, how.training_template)
    return found


def config_of(
    spec: SftSpec, ctx: Context, warm: WarmModel, steps: int, *, packs: bool
) -> SFTConfig:
    from trl.trainer.sft_config import SFTConfig

    from ..training.arguments import common_arguments
    from ..training.lora import chosen_learning_rate

    return SFTConfig(
        **common_arguments(spec, ctx),
        max_steps=steps,
        # Packs hold all rows of a step, whatever its micro-steps are: the loss is the same.
        per_device_train_batch_size=spec.rows_per_step if packs else spec.batch_size,
        gradient_accumulation_steps=1 if packs else spec.gradient_accumulation,
        learning_rate=chosen_learning_rate(
            spec, ctx, _usual_learning_rate(warm.model.num_parameters())
        ),
        warmup_steps=spec.warmup_steps,
        max_length=None,  # the rows are cut already
        dataset_kwargs={"skip_prepare_dataset": True},
        optim="adamw_torch_fused",
        activation_checkpointing=False,
    )


def _usual_learning_rate(num_parameters: int) -> float:
    if num_parameters < 1e6:
        return 1e-3
    return 3e-4 if num_parameters < 1e8 else 2e-5


def training_of(
    spec: SftSpec,
    ctx: Context,
    warm: WarmModel,
    steps: int,
    examples: Examples[Example],
    held_out: Examples[Example],
    data: str,
) -> tuple[Supervised, Training]:
    from ..sequences.attention import can_pack
    from ..sequences.passes import pack_tokens, require_one_process
    from ..training.arguments import in_float32, pad_id, set_router
    from ..training.loop import Training
    from ..training.lora import with_adapter
    from .task import Supervised

    model = in_float32(warm.model)
    packs = can_pack(model)
    if not packs:
        require_one_process(ctx.ranks, model)
    model = model.requires_grad_(True) if spec.lora is None else with_adapter(warm, model, spec)
    args = config_of(spec, ctx, warm, steps, packs=packs)
    set_router(model, args)
    task = Supervised(
        ctx=ctx,
        args=args,
        model=model,
        pad_id=pad_id(model, warm.tokenizer),
        examples=examples,
        held_out=held_out,
        data=data,
        most_tokens=pack_tokens(model, ctx) if packs else None,
    )
    training = Training(
        ctx=ctx,
        spec=spec,
        args=args,
        model=model,
        tokenizer=warm.tokenizer,
        task=task,
        measured=task if held_out else None,
        eval_every=spec.eval_every,
        differences_since=task.differences_since,
    )
    return task, training
