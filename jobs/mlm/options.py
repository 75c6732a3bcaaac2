"""The options of the MLM kind and their checks at submission. Imports no torch."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from ..data import texts
from ..data.options import Content, RecordsSpec
from ..data.reader import Reading
from ..data.sources import located
from ..errors import SpecError
from ..files.jsonl import Place
from ..models.architectures import check_fills_masks
from ..models.folder_checks import read_config
from ..models.folder_files import BadFile
from ..models.model_types import check_type
from ..models.tokenizer_folder import TokenizerFolder
from ..relations import (
    ABOVE_0,
    GIVEN,
    Relation,
    goes_with,
    is_in,
    is_not,
    never_with,
)
from ..spec import HttpMethod, option, override, path_of
from ..training.options import (
    MOST_ROWS,
    MOST_STEPS,
    MOST_TOKENS,
    TrainingSpec,
)

CODE_GRAPH = "code-graph"
STDLIB = "stdlib"
TEXT, GRAPH = "mlm", "mlm+mnm"
CODE_GRAPH_SIZES = {  # of the encoder's configuration, which needs torch
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 4096,
}
MIN_GRAPH = 64  # tokens in which code and graph have room
LEARNING_RATE = 2.5e-4  # default
STEPS = 1000  # default
WARMUP_STEPS = 500  # at most, unless the options say otherwise

_RATES = (*("mlm_acc", "mnm_acc", "mlm_mrr", "mnm_mrr", "mlm_hits10", "mnm_hits10", "link_mrr"),)


@dataclass(frozen=True, kw_only=True)
class MlmSpec(RecordsSpec, TrainingSpec):
    """Train a masked language model on text, or on Python code with its knowledge graph."""

    kind: ClassVar[str] = "mlm"
    http: ClassVar[HttpMethod | None] = HttpMethod(
        type="mlm", training_file="data", builtin_data=STDLIB, harmless_text=("columns",)
    )
    trains: ClassVar[str] = "masked model"
    judged_by: ClassVar[tuple[str, ...]] = (
        *("loss", "mlm_loss", "mnm_loss", "eval_mlm_loss", "eval_mnm_loss"),
        *_RATES,
    )
    compared_by: ClassVar[tuple[str, str]] = ("eval_mlm_loss", "mlm_loss")
    changeable: ClassVar[tuple[str, ...]] = (*TrainingSpec.changeable, "eval_every")
    of_new_model: ClassVar[tuple[str, ...]] = (
        *("architecture", "hidden_size", "layers", "heads", "ffn_size"),
        *("tokenizer", "vocab_size"),
    )

    relations: ClassVar[tuple[Relation, ...]] = (
        goes_with("keep_best", when=is_in(*_RATES), eval_every=ABOVE_0),
        goes_with("eval_first", eval_every=ABOVE_0),
        goes_with("lora", model=GIVEN),
        goes_with(
            *("mnm_rate", "mnm_weight", "mnm_ramp_steps", "constraint_weight"), objective=GRAPH
        ),
        never_with(*("architecture", "hidden_size", "layers", "heads", "ffn_size"), model=GIVEN),
        never_with("tokenizer", when=is_in("train"), model=GIVEN),
        # A new code-graph encoder has no tokenizer yet, and is of no use for text.
        goes_with("tokenizer", when=is_in("own"), model=GIVEN, architecture=is_not(CODE_GRAPH)),
        goes_with("objective", when=is_in(TEXT), model=GIVEN, architecture=is_not(CODE_GRAPH)),
    )

    objective: str = option(
        GRAPH,
        f"training objective; {TEXT}: masked tokens of text (BERT); {GRAPH}: masked tokens of code "
        f"and masked nodes of its knowledge graph, for {CODE_GRAPH}",
        group="data",
        choices=(TEXT, GRAPH),
    )
    data: str = option(
        STDLIB,
        "text file (one document per paragraph), JSONL, CSV or Parquet file of text records, "
        "folder of them or hub data set (owner/name:config:split); for "
        f"{GRAPH} a folder of Python sources; {STDLIB}: the standard library of this Python",
        group="data",
    )
    tokenizer: str | None = option(
        None,
        "tokenizer folder, own (the one of the model) or train (byte-level BPE, on the data)",
        group="data",
        default_text="own, or train where the model has none",
    )
    vocab_size: int = option(
        8000,
        "vocabulary size of a trained tokenizer",
        group="data",
        minimum=300,
        maximum=10**6,
    )
    seq_len: int = option(
        128, "maximum tokens per example", group="data", minimum=8, maximum=MOST_TOKENS
    )
    validation: float = option(
        0.05, "fraction of the documents to hold out", group="data", minimum=0, maximum=0.9
    )
    mlm_rate: float = option(
        0.15, "fraction of the text tokens to mask", group="data", above=0, maximum=1
    )
    mnm_rate: float = option(
        0.20, "fraction of the graph tokens to mask", group="data", above=0, maximum=1
    )
    masks: str = option(
        "dynamic",
        "masking; dynamic: new masks in every epoch (RoBERTa); static: the same masks always",
        group="data",
        choices=("dynamic", "static"),
    )
    mask_80_10_10: bool = option(
        False,
        "BERT masking: 80 % [MASK], 10 % a random token, 10 % unchanged; otherwise all [MASK]",
        group="data",
    )

    model: str | None = option(
        None, "warm model to train", group="model", default_text="a new model, by architecture"
    )
    architecture: str = option(
        CODE_GRAPH,
        f"architecture of a new model: {CODE_GRAPH}, a model folder or a config.json",
        group="model",
    )
    layers: int | None = option(
        None,
        "number of layers of a new model",
        group="model",
        default_text="by architecture",
        minimum=1,
        maximum=1024,
    )
    hidden_size: int | None = option(
        None,
        "hidden size of a new model",
        group="model",
        default_text="by architecture",
        minimum=1,
        maximum=2**16,
    )
    heads: int | None = option(
        None,
        "attention heads of a new model",
        group="model",
        default_text="by architecture",
        minimum=1,
        maximum=1024,
    )
    ffn_size: int | None = option(
        None,
        "feed-forward size of a new model",
        group="model",
        default_text="by architecture",
        minimum=1,
        maximum=2**18,
    )
    dropout: float | None = option(
        None,
        "dropout probability of all layers",
        group="model",
        default_text="that of the model",
        minimum=0,
        maximum=0.9,
    )

    learning_rate: float | None = override(
        TrainingSpec, "learning_rate", default_text=f"{LEARNING_RATE:g}; with lora, ten times that"
    )
    steps: int | None = override(TrainingSpec, "steps", default_text=str(STEPS))
    batch_size: int = override(TrainingSpec, "batch_size", default=8)
    gradient_accumulation: int = override(TrainingSpec, "gradient_accumulation", default=1)
    warmup_steps: int | None = override(
        TrainingSpec,
        "warmup_steps",
        default_text=f"a tenth of the steps, at most {WARMUP_STEPS}",
    )
    weight_decay: float = override(TrainingSpec, "weight_decay", default=0.01)
    mlm_weight: float = option(
        1.0, "weight of the text-token loss", group="optimization", minimum=0, maximum=1000
    )
    mnm_weight: float = option(
        1.0, "weight of the graph-token loss", group="optimization", minimum=0, maximum=1000
    )
    mnm_ramp_steps: int = option(
        0,
        "steps in which mnm_weight rises linearly from 0",
        group="optimization",
        minimum=0,
        maximum=MOST_STEPS,
    )
    constraint_weight: float = option(
        1.0,
        "weight of the loss on relation constraints",
        group="optimization",
        minimum=0,
        maximum=1000,
    )

    eval_dataset: str | None = option(
        None,
        "held-out documents in the same format as data; their duplicates in data are not trained "
        "on",
        group="evaluation",
        default_text="a part of data: see validation",
    )
    eval_every: int = option(
        100,
        "steps between evaluations (0: no evaluation)",
        group="evaluation",
        minimum=0,
        maximum=MOST_STEPS,
    )
    validation_examples: int = option(
        200,
        "number of held-out examples to evaluate on (0: all)",
        group="evaluation",
        minimum=0,
        maximum=MOST_ROWS,
    )
    eval_first: bool = option(False, "evaluation before the first step as well", group="evaluation")

    save_every: str = override(TrainingSpec, "save_every", default="100")

    @property
    def is_measured(self) -> bool:
        """Whether there are evaluations."""
        return self.eval_every > 0

    @property
    def steps_total(self) -> int | None:
        """The optimizer steps of the whole job; None: planned from the time limit."""
        return STEPS if self.steps is None and self.time_limit is None else self.steps

    @property
    def most_processes(self) -> int:
        return self.batch_size

    def warmup_for(self, steps: int) -> int:
        if self.warmup_steps is not None:
            return self.warmup_steps
        return 0 if self.lr_scheduler == "constant" else min(steps // 10, WARMUP_STEPS)

    @property
    def warmup(self) -> int | None:
        """The steps of learning-rate warmup; None: not known before the steps are planned."""
        return None if self.steps_total is None else self.warmup_for(self.steps_total)

    @property
    def sizes(self) -> dict[str, Any]:
        """The given sizes of a new model, by the names of transformers."""
        given = {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.ffn_size,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def data_path(self) -> Path:
        """The file or folder with the data."""
        return Path(sysconfig.get_path("stdlib") if self.data == STDLIB else self.data)

    def check(self) -> None:
        super().check()
        if self.model is None and self.objective == GRAPH and self.seq_len < MIN_GRAPH:
            raise SpecError(
                "seq_len", f"must be at least {MIN_GRAPH} for {GRAPH}, got {self.seq_len}"
            )

    def content_of(self, values: Mapping[str, Any], place: Place) -> Content:
        return texts.text_of(values, place)

    def cut_at(self, positions: int | None) -> int | None:
        return self.seq_len

    def located(self, folder: Path) -> Self:
        """Return the spec with paths, relative to `folder`, made absolute.

        Raises SpecError.
        """
        changes: dict[str, Any] = {}
        if self.eval_dataset is not None:
            changes["eval_dataset"] = located(
                "eval_dataset", self.eval_dataset, folder, texts.TAKES
            )
        if self.data != STDLIB:
            changes["data"] = located("data", self.data, folder, texts.TAKES)
        if self.architecture != CODE_GRAPH:
            changes["architecture"] = str(path_of("architecture", self.architecture, folder))
        if self.tokenizer not in (None, "own", "train"):
            changes["tokenizer"] = str(path_of("tokenizer", str(self.tokenizer), folder))
        return replace(self, **changes)

    def extended(self, steps: int) -> Self:
        """Return the spec with another total number of steps. Raises SpecError."""
        return replace(self, steps=self.options()["steps"].convert(steps))

    def check_model_files(self, folder: Path) -> str | None:
        """Check the tokenizer of the model, if it is used. Raises SpecError."""
        if self.tokenizer in (None, "own"):
            _check_mask_token("model", str(self.model), folder)
        return super().check_model_files(folder)

    def check_inputs(self, model_config: Mapping[str, Any] | None) -> None:
        """Check data, architecture, tokenizer and lengths, which need files. Raises SpecError.

        `model_config` is the content of the model's config.json, None when it is not available.
        """
        from .corpus import check_sources, check_texts

        super().check_inputs(model_config)
        if self.objective == TEXT:
            reading = Reading(self.column_names, self.skip_bad_rows)
            check_texts("data", str(self.data_path), reading)
            if self.eval_dataset is not None:
                check_texts("eval_dataset", self.eval_dataset, reading)
        else:
            check_sources("data", self.data_path)
            if self.eval_dataset is not None:
                check_sources("eval_dataset", Path(self.eval_dataset))
        if self.tokenizer not in (None, "own", "train"):
            _check_mask_token("tokenizer", str(self.tokenizer), Path(str(self.tokenizer)))
        if self.model is not None:
            config = dict(model_config or {})
            check_fills_masks(config)
        elif self.architecture == CODE_GRAPH:
            config = CODE_GRAPH_SIZES | self.sizes
        else:
            config = read_architecture(self.architecture) | self.sizes
        limit = config.get("max_position_embeddings")
        if limit is not None and self.seq_len > limit:
            raise SpecError(
                "seq_len",
                f"must be at most {limit} (the positions of the model), got {self.seq_len}",
            )
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        are_one = isinstance(hidden, int) and isinstance(heads, int)  # not one for each layer
        if are_one and heads and hidden % heads:
            raise SpecError("heads", f"must divide the hidden size of {hidden}, got {heads}")


def _check_mask_token(option: str, name: str, folder: Path) -> None:
    """Raise SpecError for a tokenizer without a mask token.

    Classes of certain architectures have one that no file names; these are left to the job.
    """
    files = TokenizerFolder(folder)
    if files.is_generic() and "mask_token" not in files.special_tokens():
        raise SpecError(option, f"must have a tokenizer with a mask token, got {name}")


def read_architecture(path: str) -> dict[str, Any]:
    """Read a config.json, given itself or by its folder. Raises SpecError."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    takes = f"must be {CODE_GRAPH}, a model folder or a config.json, got {path!r}"
    try:
        config = read_config(file)
    except BadFile as error:
        raise SpecError("architecture", f"{takes}: {error}") from error
    except OSError as error:
        raise SpecError("architecture", takes) from error
    if "model_type" not in config:
        raise SpecError("architecture", takes)
    check_type("architecture", config)
    return config
