"""The engines of this process: one for each model and served precision, shared by all jobs."""

from __future__ import annotations

import threading

from ..compute.levels import NATIVE
from ..compute.linears import served_precision
from ..context import Context, WarmModel
from ..models.architectures import check_can_generate
from ..models.generation_settings import unapplied_words
from ..models.pretrained_tokenizer import appended_end_words
from .decoder import Decoder
from .engine import Engine

_engines: dict[tuple[int, str], Engine] = {}  # by model and served precision
_making = threading.Lock()


def engine_of(warm: WarmModel, precision: str = NATIVE) -> Engine:
    """Return this process's engine for a model and precision; jobs share it.

    Raises JobFailed for a model that generates no text.
    """
    model = warm.model
    check_can_generate(model)
    with _making:
        served = NATIVE  # FallbackRunner has no other
        if Decoder.supports(model):
            # By the served precision, not the requested one: two engines would each have packed
            # weights and a memory budget.
            served = served_precision(precision, model.get_input_embeddings().weight)
        key = (id(model), served)
        if key not in _engines:
            _engines[key] = Engine(warm, precision=served)
        return _engines[key]


def warn_of_model(ctx: Context, engine: Engine, warm: WarmModel) -> None:
    """Warn of a model without a KV cache, an appended end token and ignored generation settings.

    Call it after the first token: whether the cache can be used is known then.
    """
    if engine.uncached is not None:
        ctx.emit("warning", message=f"model: {engine.uncached}")
    if warm.appended_end is not None:
        ctx.emit("warning", message=f"model: {appended_end_words(warm.appended_end)}")
    if warm.unapplied:
        ctx.emit("warning", message=f"model: {unapplied_words(warm.unapplied)}")


def kept_bytes() -> tuple[int, int]:
    """Memory that the idle engines of this process keep on purpose.

    The size of their caches now, and the most that their packed weights can take.
    """
    with _making:
        engines = list(_engines.values())
    return sum(one.cached_bytes for one in engines), sum(one.weights_bytes for one in engines)
