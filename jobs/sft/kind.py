"""The SFT kind: supervised fine-tuning of a decoder.

`options.py` has its options, `dataset.py` the rows and their tokens, `task.py` the loss, which
needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..context import Context, WarmModel
from ..errors import JobFailed
from ..files.chats import Chat
from ..models import chat_templates
from ..models.chat_templates import ChatTemplate
from ..training import row_job
from ..training.begin import by_size
from ..training.lengths import most_tokens_of_a_row
from ..training.row_job import Prepared
from ..training.rows import Rows
from .dataset import ZERO_WEIGHT, Example, Tokenization
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
    data = prepare(spec, ctx, ctx.models.take(spec.model), ctx.checkpoints.latest())
    is_new = data.checkpoint is None
    if spec.assistant_only_loss and is_new and not _learns_to_stop(cast(Tokenization, data.how)):
        ctx.emit(
            "warning",
            message="assistant_only_loss: the chat template does not mark the end-of-turn token as "
            "what the assistant says: the model may not learn to stop",
        )
    task, training = training_of(data)
    return row_job.run_training(
        data,
        training,
        most_tokens=task.scorer.most_tokens,
        measured=("loss", "mean_token_accuracy"),
    )


def prepare(
    spec: SftSpec, ctx: Context, warm: WarmModel, checkpoint: Path | None = None
) -> Prepared[Example]:
    return row_job.prepare(
        spec, ctx, warm, Example, lambda rows: tokenization_of(spec, warm, rows), checkpoint
    )


def tokenization_of(spec: SftSpec, warm: WarmModel, rows: Rows[Any]) -> Tokenization:
    return Tokenization(
        tokenizer=warm.tokenizer,
        max_length=most_tokens_of_a_row(spec.max_length, warm.model, spec.model),
        completion_only_loss=spec.completion_only_loss,
        assistant_only_loss=spec.assistant_only_loss,
        training_template=_training_template(warm.tokenizer, spec, rows),
    )


def _training_template(tokenizer: Any, spec: SftSpec, rows: Rows[Any]) -> str | None:
    """Return TRL's variant of a known chat template that marks the assistant, where it is needed.

    None: the tokenizer's own. Raises JobFailed if there is none.
    """
    has_zero_weight = any(ZERO_WEIGHT in parts for parts in rows.parts)
    if not has_zero_weight and not (spec.assistant_only_loss and rows.has_chats):
        return None
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if not tokenizer.chat_template or has_generation_markers(tokenizer.chat_template):
        return None
    # TRL renders without limits.
    chat_templates.render(ChatTemplate.of(tokenizer), Chat([{"role": "user", "content": "a"}]))
    try:
        found: str | None = get_training_chat_template(tokenizer)
    except Exception as error:  # it renders the template, which can raise anything
        only = spec.assistant_only_loss
        option = "assistant_only_loss: must be false" if only else "weight: must be 1"
        raise JobFailed(f"{option} {NOT_MARKED}") from error
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
    spec: SftSpec, ctx: Context, warm: WarmModel, steps: int | None, *, packs: bool
) -> SFTConfig:
    from trl.trainer.sft_config import SFTConfig

    from ..training.arguments import UNPLANNED, common_arguments
    from ..training.lora import chosen_learning_rate

    return SFTConfig(
        **common_arguments(spec, ctx),
        max_steps=UNPLANNED if steps is None else steps,
        # Packs hold all rows of a step, whatever its micro-steps are: the loss is the same.
        per_device_train_batch_size=spec.rows_per_step if packs else spec.batch_size,
        gradient_accumulation_steps=1 if packs else spec.gradient_accumulation,
        learning_rate=chosen_learning_rate(
            spec, ctx, by_size(warm.model.num_parameters(), 1e-3, 3e-4, 2e-5)
        ),
        warmup_steps=spec.warmup_steps,
        max_length=None,  # the rows are cut already
        dataset_kwargs={"skip_prepare_dataset": True},
        optim="adamw_torch_fused",
    )


def training_of(data: Prepared[Example]) -> tuple[Supervised, Training]:
    from ..sequences.attention import can_pack
    from ..training.arguments import in_float32, scorer_of
    from ..training.lora import with_adapter
    from .task import Supervised

    spec, ctx, warm = data.spec, data.ctx, data.warm
    model = in_float32(warm.model)
    model = model.requires_grad_(True) if spec.lora is None else with_adapter(warm, model, spec)
    args = config_of(spec, ctx, warm, data.steps, packs=can_pack(model))
    task = Supervised(
        ctx=ctx,
        args=args,
        model=model,
        scorer=scorer_of(model, ctx, warm.tokenizer, args, wants_top=True),
        examples=data.examples,
        held_out=data.held_out,
        data=data.rows.fingerprint,
    )
    return task, row_job.training_of(data, args, model, task)
