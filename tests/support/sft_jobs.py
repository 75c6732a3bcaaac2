"""SFT jobs that take a second: rows in files, tiny models, and trainers of TRL's and warmd's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Sampler
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, set_seed
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from warmd.jobs.compute.aten_overrides import fast_kernels
from warmd.jobs.context import Context
from warmd.jobs.dpo.options import REWARDS
from warmd.jobs.sft.dataset import Example, Tokenization
from warmd.jobs.sft.options import SftSpec
from warmd.jobs.sft.task import Supervised
from warmd.jobs.training.arguments import KEPT_ACTIVATIONS, scorer_of
from warmd.jobs.training.epochs import drawn_by_epoch
from warmd.jobs.training.loop import Training
from warmd.jobs.training.tokens import Examples, tokenized

# Marks the assistant's text and its end-of-turn token.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SIZES = {
    "vocab_size": 85,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    **{"vocab_size": 85, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.2},
    **{"bos_token_id": 1, "eos_token_id": 2},
}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def turns(number: int) -> list[dict[str, str]]:
    return [
        message("user", f"what is {number}+{number}"),
        message("assistant", f"{2 * number}"),
        message("user", "and one more" + "?" * (number % 5)),
        message("assistant", f"{2 * number + 1}, of course" * (1 + number % 2)),
    ]


ROWS: dict[str, list[dict[str, Any]]] = {
    "prompt and completion": [
        {"prompt": f"{n}+{n * 7}=", "completion": str(n * 8) * (1 + n % 3)} for n in range(14)
    ],
    "chat": [{"messages": turns(n)} for n in range(14)],
    "chat prompt": [{"prompt": turns(n)[:3], "completion": turns(n)[3:]} for n in range(14)],
    "no prompt": [{"prompt": "", "completion": str(n * 8) * (1 + n % 3)} for n in range(14)],
    # Half of the prompts fill 10 tokens.
    "long prompts": [
        {"prompt": f"{n}+1=".ljust(4 + n % 2 * 8, "?"), "completion": "yes"} for n in range(14)
    ],
    "text": [{"text": f"{n} and {n + 1}" + " more" * (n % 4)} for n in range(14)],
}


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_bytes(
        b"\n".join(row if isinstance(row, bytes) else orjson.dumps(row) for row in rows)
    )
    return str(path)


def spec(folder: Path, form: str = "prompt and completion", **options: Any) -> SftSpec:
    """A job of a few steps of a tiny model on short rows."""
    small = {
        "dataset": write(folder / "rows.jsonl", ROWS[form]),
        "batch_size": 2,
        "learning_rate": 1e-2,
        "save_every": 3,
        "keep": 100,
    }
    return SftSpec.parse(small | options).located(folder)


def tokenizer() -> Any:
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


def small(architecture: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = GPT2 if architecture == "gpt2" else SIZES
    config = AutoConfig.for_model(architecture, **sizes | changes)
    made: Any = AutoModelForCausalLM.from_config(config)
    return made.requires_grad_(False).eval()


class EpochOrder(Sampler[int]):
    """The rows of every epoch in the order of warmd: that of (seed, epoch)."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch = count, seed, 0

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; called by the Trainer."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(drawn_by_epoch(self.count, self.seed)(self.epoch))


class InOrder:
    """TRL draws its order from a generator that runs on; both sides are given the same one."""

    def _get_train_sampler(self, dataset: Any = None) -> EpochOrder:
        return EpochOrder(len(self.train_dataset), 3)  # type: ignore[attr-defined]


class Stock(InOrder, SFTTrainer):
    pass


def with_adapter(model: Any, lora: LoraConfig, seed: int) -> Any:
    """Make an adapter as TRL does, from its seed."""
    set_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a deprecated attribute, and of GPT-2's layers
        return get_peft_model(model, copy.deepcopy(lora))


def trainer(
    side: str, folder: Path, model: Any, form: str, *, how: dict[str, Any], **options: Any
) -> Any:
    """A training of 5 steps on a copy of `model`: TRL's trainer on rows, or warmd's own loop.

    `lora`: the config of an adapter to train, made from the seed as TRL makes it.
    """
    lora = options.pop("lora", None)
    # Plain descent: AdamW makes of a weight that learns nothing but rounding one that moves.
    usual: dict[str, Any] = {
        "max_steps": 5,
        "per_device_train_batch_size": 4,
        "optim": "sgd",
        "learning_rate": 0.1,
        "use_cpu": True,
    }
    if side == "warmd":
        usual |= {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
    config = SFTConfig(
        output_dir=str(folder),
        bf16=False,
        **KEPT_ACTIVATIONS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        seed=3,
        **usual | ({} if side == "warmd" else how) | options,
    )
    learner = copy.deepcopy(model).requires_grad_(True)
    if lora is not None:
        learner = with_adapter(learner, lora, config.seed)
    if side == "warmd":
        return _training(folder, learner, form, how, config)
    return Stock(
        model=learner,
        args=config,
        processing_class=tokenizer(),
        train_dataset=Dataset.from_list(ROWS[form]),
    )


def _training(folder: Path, model: Any, form: str, how: dict[str, Any], config: Any) -> Training:
    made = Tokenization(
        tokenizer=tokenizer(),
        max_length=how.get("max_length", 1024),
        **{name: value for name, value in how.items() if name != "max_length"},
    )
    parts = parts_of(folder, model, spec(folder, form, save_every=1000), made, Example, config)
    return parts.training(Supervised(**parts.of_task), made.tokenizer)


@dataclass(frozen=True)
class Parts:
    """What a training on rows is made of, apart from its task."""

    ctx: Context
    spec: Any
    config: Any  # of TRL
    of_task: dict[str, Any]  # the arguments that all tasks on rows take

    def training(self, task: Any, tokenizer: Any, **more: Any) -> Training:
        return Training(
            ctx=self.ctx,
            spec=self.spec,
            args=self.config,
            model=self.of_task["model"],
            tokenizer=tokenizer,
            task=task,
            **more,
        )


def parts_of(folder: Path, model: Any, job: Any, how: Any, kind: type[Any], config: Any) -> Parts:
    """Tokenize the rows of a job, and return what its training is made of."""
    ctx = tiny.surroundings(folder / "run", model).ctx
    rows = job.source.load()
    corpus = tokenized(ctx.cache_dir, job.kind, rows, how, lambda: None, lambda *_: None, None)
    of_task = {
        "ctx": ctx,
        "args": config,
        "model": model,
        "scorer": scorer_of(model, ctx, how.tokenizer, config, wants_top=True),
        "examples": Examples(corpus, corpus.train, kind),
        "held_out": Examples(corpus, corpus.validation, kind),
        "data": rows.fingerprint,
    }
    return Parts(ctx, job, config, of_task)


class _Gradients(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Keeps the gradients of the first step."""

    def __init__(self) -> None:
        self.first: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._keep(kwargs["model"])

    @contextmanager
    def of_own_loop(self, model: Any) -> Iterator[None]:
        """Keep those of a training of warmd within this block."""
        handle = register_optimizer_step_pre_hook(lambda *_: self._keep(model))
        try:
            yield
        finally:
            handle.remove()

    def _keep(self, model: Any) -> None:
        if not self.first:
            self.first = [w.grad.clone() for w in model.parameters() if w.requires_grad]


def train(made: Any) -> tuple[list[dict[str, Any]], list[torch.Tensor], list[torch.Tensor]]:
    """Train and return the metrics of each step, the first step's gradients, and the weights."""
    gradients = _Gradients()
    logged: list[dict[str, Any]] = []
    if isinstance(made, Training):
        with gradients.of_own_loop(made.model):
            made.run(None)
        emitted = made.ctx.emit.__self__.events  # type: ignore[attr-defined]
        logged = [event for event in emitted if event["type"] == "step"]
    else:
        made.add_callback(gradients)
        log = made.log

        def keep(logs: dict[str, Any], *rest: Any) -> None:
            log(logs, *rest)
            logged.append(logs)

        made.log = keep
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
            made.train()
        del logged[-1]  # the summary
    names = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", *REWARDS)
    found = [{name: step[name] for name in names if name in step} for step in logged]
    trained = (weight for weight in made.model.parameters() if weight.requires_grad)
    return found, gradients.first, [weight.detach() for weight in trained]


def assert_same_training(theirs: Any, made: Training, *, slack: float) -> None:
    """Check that five steps of warmd equal those of TRL: metrics, first gradients and weights.

    `slack`: absolute tolerance of the metrics.
    """
    expected = train(theirs)
    starts = [w.detach().clone() for w in made.model.parameters() if w.requires_grad]
    with fast_kernels():  # as in a job
        found = train(made)
    assert len(found[0]) == len(expected[0]) == 5
    for our, their in zip(found[0], expected[0], strict=True):
        assert our == pytest.approx(their, rel=2e-5, abs=slack)
    largest = max(float(gradient.abs().max()) for gradient in expected[1])
    for our_gradient, their_gradient in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(our_gradient, their_gradient, rtol=2e-5, atol=2e-5 * largest)
    moved = max(
        float((weight - start).abs().max())
        for weight, start in zip(expected[2], starts, strict=True)
    )
    assert moved > 0
    for our_weight, their_weight in zip(found[2], expected[2], strict=True):
        torch.testing.assert_close(our_weight, their_weight, rtol=0, atol=2e-4 * moved)
