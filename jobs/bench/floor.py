"""The floor model: the least time of a training step on a device, by the device's two limits.

A step does floating-point operations, at the rate of a large GEMM, and moves bytes through memory
(roofline model, doi:10.1145/1498765.1498785). Neither is counted exactly: what a job takes beyond
its floor is measured or assumed by the caller. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean
from typing import Any

from ..dpo.options import DpoSpec
from ..grpo.options import GrpoSpec
from ..mlm.options import CODE_GRAPH, CODE_GRAPH_SIZES, MlmSpec, read_architecture
from ..training.options import TrainingSpec
from ..training.row_options import RowTrainingSpec

# AdamW reads four float32 arrays and writes three: gradient, weight and two moments.
_ADAMW_BYTES = 4 * 7
_STATE_BYTES = 16  # per trained parameter: weight, gradient, two moments, in float32
_WEIGHT_BYTES = 4  # per frozen parameter
_PACK_TOKENS = 4096  # most tokens of one pass of the model
_SAMPLED = 100  # records whose tokens are counted
_CHARACTERS_PER_TOKEN = 4.0  # where there is no tokenizer to count with

CountTokens = Callable[[str], int]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a device: operations and bytes per second, bytes of memory."""

    flops: float
    bytes_s: float
    memory_bytes: float
    layer_s: float  # least time of one layer in one pass: starting its kernels


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device by its name, with the rates that its maker publishes."""

    name: str
    limits: Limits
    rates: str  # which published rates the limits are


HARDWARE = (
    Hardware(
        name="A100",
        limits=Limits(flops=312e12, bytes_s=2.039e12, memory_bytes=80e9, layer_s=1e-4),
        rates="SXM, 80 GB: 312 TFLOPS bf16, 2.04 TB/s",
    ),
    Hardware(
        name="H200",
        limits=Limits(flops=989e12, bytes_s=4.8e12, memory_bytes=141e9, layer_s=1e-4),
        rates="SXM, 141 GB: 989 TFLOPS bf16, 4.8 TB/s",
    ),
    Hardware(
        name="4090",
        limits=Limits(flops=165.2e12, bytes_s=1.008e12, memory_bytes=24e9, layer_s=1e-4),
        rates="24 GB: 165 TFLOPS bf16, 1.01 TB/s",
    ),
    # 6 cores at 4.7 GHz with two AVX2 FMA units, 8 at 3.5 GHz with half of that; DDR5-4800 x 2.
    Hardware(
        name="14-core laptop",
        limits=Limits(flops=1.35e12, bytes_s=76.8e9, memory_bytes=32e9, layer_s=2e-5),
        rates="i7-12700H, 32 GB: 1.35 TFLOPS float32 (AVX2), 76.8 GB/s",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of a model that determine the duration of a step."""

    parameters: int
    trained: int  # parameters: fewer with LoRA
    layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int

    @classmethod
    def of(
        cls, config: Mapping[str, Any], parameters: int, *, lora: int | None
    ) -> ModelSize | None:
        """Read the sizes from the content of a config.json; None if one is missing.

        `lora`: the rank of an adapter of all linear layers.
        """
        config = config.get("text_config", config)
        layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
        if not isinstance(layers, int) or not isinstance(hidden, int):
            return None
        intermediate = config.get("intermediate_size")
        inner = intermediate if isinstance(intermediate, int) else 4 * hidden
        vocabulary = config.get("vocab_size")
        # Four matrices of attention, three of the feed-forward network, each with a pair of rank r.
        adapter = layers * (4 * 2 * hidden + 3 * (hidden + inner))
        return cls(
            parameters=parameters,
            trained=parameters if lora is None else lora * adapter,
            layers=layers,
            hidden_size=hidden,
            intermediate_size=inner,
            vocab_size=vocabulary if isinstance(vocabulary, int) else 0,
        )

    @property
    def state_bytes(self) -> int:
        """Memory of weights, gradients and moments of AdamW in float32."""
        frozen = self.parameters if self.trained < self.parameters else 0
        return int(_STATE_BYTES * self.trained + _WEIGHT_BYTES * frozen)

    @classmethod
    def of_new(cls, spec: MlmSpec) -> ModelSize | None:
        """The sizes of the model that an MLM job creates; None if its architecture lacks one.

        Parameters: four matrices of attention and two of the feed-forward network per layer, token
        and position embeddings, and two untied heads for code-graph.
        """
        is_graph = spec.architecture == CODE_GRAPH
        config = {**(CODE_GRAPH_SIZES if is_graph else read_architecture(spec.architecture))}
        config |= {"vocab_size": config.get("vocab_size", spec.vocab_size)} | spec.sizes
        found = cls.of(config, 0, lora=None)
        if found is None:
            return None
        width, inner = found.hidden_size, found.intermediate_size
        tokens = found.vocab_size * (3 if is_graph else 1)
        tokens += config.get("max_position_embeddings") or 0
        parameters = found.layers * (4 * width * width + 2 * width * inner) + tokens * width
        return replace(found, parameters=parameters, trained=parameters)

    @property
    def head(self) -> int:
        """Number of weights of the vocabulary head."""
        return min(self.vocab_size * self.hidden_size, self.parameters)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The tokens that one optimizer step computes."""

    learned: float  # tokens that go forward and backward through the layers
    scored: float  # tokens of these that go through the vocabulary head
    passes: int  # forward passes over separate batches
    pass_tokens: float  # tokens of the largest pass
    has_reference: bool = False  # the reference model reads all tokens as well
    prefilled: float = 0.0  # tokens of prompts before completions are generated
    decoded: float = 0.0  # decode steps one after another, each of which reads all weights
    decode_bytes: int = _WEIGHT_BYTES  # per weight

    def floor_s(self, model: ModelSize, limits: Limits) -> float:
        """Return the least seconds of the step: GEMMs, weight traffic, kernel starts."""
        layers = model.parameters - model.head
        gemms = 4 if self.has_reference else 3  # forward, two backward; the reference's forward
        operations = 2 * gemms * (self.learned * layers + self.scored * model.head)
        operations += 2 * self.prefilled * layers
        moved = model.parameters * self.decode_bytes * self.decoded + _ADAMW_BYTES * model.trained
        started = model.layers * limits.layer_s * (gemms * self.passes + self.decoded)
        return operations / limits.flops + moved / limits.bytes_s + started

    def memory_bytes(self, model: ModelSize) -> tuple[float, float]:
        """Return the bytes of weights and optimizer, and those with activations and logits.

        Activations: of a layer 12 vectors of hidden size and 5 of intermediate size per token;
        logits, their log-probabilities and gradients, in float32.
        """
        state = float(model.state_bytes)
        layer = 12 * model.hidden_size + 5 * model.intermediate_size
        share = self.scored / self.learned if self.learned else 1.0
        per_token = 4 * model.layers * layer + 4 * 3 * model.vocab_size * share
        return state, state + self.pass_tokens * per_token


def step_work(spec: TrainingSpec, count: CountTokens | None) -> tuple[StepWork, StepWork] | None:
    """Return lower and upper bounds of a step's work; None for a kind without a model.

    `count`: returns the tokens of a text; None: by the number of characters. Reads the first
    records of the data set.
    """
    if isinstance(spec, GrpoSpec):
        return _of_grpo(spec, count)
    if isinstance(spec, RowTrainingSpec):
        return _of_rows(spec, count)
    if isinstance(spec, MlmSpec):
        most = spec.batch_size * spec.gradient_accumulation * spec.seq_len
        return _work(most / 2, 0.15, spec), _work(most, 1.0, spec)
    return None


def _of_grpo(spec: GrpoSpec, count: CountTokens | None) -> tuple[StepWork, StepWork]:
    prompt = _mean_tokens((problem.prompt for problem in spec.parts.training), count)
    completions = spec.prompts_per_step * spec.num_generations
    longest = spec.max_completion_length or 256
    decode_bytes = {"int8": 1, "bf16": 2}.get(spec.rollout_dtype, _WEIGHT_BYTES)

    def work(length: float) -> StepWork:
        scored = completions * length
        learned = spec.prompts_per_step * prompt + scored
        return StepWork(
            learned=learned,
            scored=scored,
            passes=max(1, round(learned / _PACK_TOKENS)),
            pass_tokens=min(learned, _PACK_TOKENS),
            has_reference=spec.beta > 0,
            prefilled=spec.prompts_per_step * prompt,
            decoded=length,
            decode_bytes=decode_bytes,
        )

    return work(max(longest / 8, 1)), work(longest)


def _of_rows(spec: RowTrainingSpec, count: CountTokens | None) -> tuple[StepWork, StepWork]:
    tokens = _mean_tokens((row.content for row in spec.rows.train), count)
    if spec.max_length is not None:
        tokens = min(tokens, spec.max_length)
    step = spec.rows_per_step * tokens
    # The head counts at completions only: between a quarter of the tokens and all.
    return _work(step, 0.25, spec), _work(step * 1.2, 1.0, spec)


def _work(tokens: float, scored: float, spec: TrainingSpec) -> StepWork:
    micro_batches = spec.gradient_accumulation or 1
    return StepWork(
        learned=tokens,
        scored=scored * tokens,
        passes=micro_batches,
        pass_tokens=min(tokens / micro_batches, _PACK_TOKENS),
        has_reference=isinstance(spec, DpoSpec),
    )


def _mean_tokens(values: Iterable[Any], count: CountTokens | None) -> float:
    """The mean number of tokens of the first records."""
    texts = [" ".join(_strings(value)) for value in islice(values, _SAMPLED)]
    if not texts:
        return 1.0
    if count is None:
        return max(fmean(map(len, texts)) / _CHARACTERS_PER_TOKEN, 1.0)
    return max(fmean(map(count, texts)), 1.0)


def _strings(value: Any) -> Iterator[str]:
    """The texts in a JSON value, without the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if name != "role":
                yield from _strings(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _strings(part)
