"""Loads a model's weights: the files and the model must have the same tensors.

transformers gives random values to tensors that the files lack, and drops tensors that the model
lacks. Both are refused here by name, and so are other shapes. This is the only place that loads a
model's weights. Imports torch and transformers in its functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import Any

from ..errors import JobFailed
from .folder_files import naming
from .pickled_weights import check_tensors
from .weight_headers import IS_DERIVED, listed, unwrapping

CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "image-text-to-text": "AutoModelForImageTextToText",
    "embedding": "AutoModel",
    "sequence-classification": "AutoModelForSequenceClassification",
}
_REFETCH = "config.json must describe the model of the files, and the files must be complete"
_BUILT = "its config.json must describe a model that transformers builds"
# Parts that pretraining adds and that no kind of job reads: the pooled output for classification,
# and the heads for the order of sentences.
_UNUSED = re.compile(r"(^|\.)pooler\.|^cls\.seq_relationship\.|^sop_classifier\.")


@dataclass(frozen=True)
class Pretrained:
    """A loaded model, and how its tensors differ from those of its files."""

    model: Any
    left_out: tuple[str, ...]  # tensors of the files that the model does not use
    new_head: tuple[str, ...]  # tensors that are not in the files: random, from a fixed seed


def load(task: str, folder: Path, *, config: Any, dtype: Any) -> Pretrained:
    """Return the model in a folder, of the class for a task (of CLASSES).

    Raises ValueError with the names of tensors that are missing, unexpected or of another shape,
    and what transformers raises for damaged files. Two differences are no error: the task
    embedding drops any head; the task masked-lm makes a new head if the files have none at all.
    """
    import transformers

    auto = getattr(transformers, CLASSES[task])
    if not any(folder.glob("*.safetensors")):
        check_tensors(folder)
    # The seed is that of a new head: the same folder is the same model.
    with naming(_BUILT), _fixed_seed(), _naming_unconverted():
        model, found = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    missing, unexpected = set(found["missing_keys"]), set(found["unexpected_keys"])
    left_out = {name for name in unexpected if _UNUSED.search(name)}
    if task == "embedding":
        left_out |= _of_a_head(unexpected, model)
        missing -= _without_pooler(model, missing)
    is_headless = task == "masked-lm" and missing and missing == _head(model)
    new_head = missing if is_headless else set()
    _check(
        model,
        missing - new_head,
        {name for name in unexpected - left_out if not IS_DERIVED.search(name)},
        {name: shapes for name, *shapes in found["mismatched_keys"]},
    )
    return Pretrained(model, tuple(sorted(left_out)), tuple(sorted(new_head)))


def restore(model: Any, checkpoint: Path) -> None:
    """Load the weights of a checkpoint into the model that it was saved from, or its adapter.

    Raises JobFailed if it has other tensors than the model.
    """
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers.trainer_utils import load_sharded_checkpoint
    from transformers.utils import SAFE_WEIGHTS_NAME

    if isinstance(model, PeftModel):
        model.load_adapter(str(checkpoint), model.active_adapters[0], is_trainable=True)
        return
    whole = checkpoint / SAFE_WEIGHTS_NAME
    if whole.is_file():
        found = model.load_state_dict(load_file(whole), strict=False)
    else:
        found = load_sharded_checkpoint(model, str(checkpoint), strict=False)
    check_restored(model, found)


def check_restored(model: Any, found: Any) -> None:
    """Check that a checkpoint had the tensors of the model. Raises JobFailed.

    `found`: what loading it returned, with `missing_keys` and `unexpected_keys`.
    """
    tensors = model.state_dict(keep_vars=True)
    missing, unexpected = set(found.missing_keys), found.unexpected_keys
    loaded = {id(tensor) for name, tensor in tensors.items() if name not in missing}
    missing = {name for name in missing if id(tensors[name]) not in loaded}  # those not tied
    if missing or unexpected:
        raise JobFailed(
            f"model: must have the tensors of the checkpoint: {len(missing)} of {len(tensors)} "
            f"tensors are missing in it ({listed(missing) or 'none'}), {len(unexpected)} "
            f"unexpected ({listed(unexpected) or 'none'})"
        )


@contextmanager
def _fixed_seed() -> Iterator[None]:
    """Draw from a generator with a fixed seed; that of the CPU only, as CUDA is not initialized."""
    import torch

    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


@contextmanager
def _naming_unconverted() -> Iterator[None]:
    """Raise ValueError with the names of tensors that cannot be converted from those of the files.

    For some architectures transformers joins tensors, such as those of experts. Its error names
    none of them; the variable `loading_info` of the function that raised it does.
    """
    try:
        yield
    except RuntimeError as error:
        frames = walk_tb(error.__traceback__)
        found = [frame.f_locals.get("loading_info") for frame, _ in frames]
        names = {name for info in found for name in getattr(info, "conversion_errors", ())}
        if not names:
            raise
        problem = f"{len(names)} tensors cannot be made of those in its files: {listed(names)}"
        raise ValueError(f"{problem}: {_REFETCH}") from error


def _of_a_head(names: Iterable[str], body: Any) -> set[str]:
    """Return the names of tensors that are not in the parts of a model without a head."""
    parts, prefix = dict(body.named_children()), f"{body.base_model_prefix}."
    return {name for name in names if name.removeprefix(prefix).split(".")[0] not in parts}


def _without_pooler(model: Any, missing: Iterable[str]) -> set[str]:
    """Remove a pooler that the files lack, and return the names of its tensors.

    Models that were saved with another head have none, and embeddings are computed without it.
    """
    pooler = {name for name in missing if name.startswith("pooler.")}
    if pooler:
        model.pooler = None
    return pooler


def _head(model: Any) -> set[str]:
    """Return the names of a model's tensors that are not in its body nor tied to one there."""
    in_body = {id(tensor) for tensor in model.base_model.state_dict(keep_vars=True).values()}
    tensors = model.state_dict(keep_vars=True)
    return {name for name, tensor in tensors.items() if id(tensor) not in in_body}


def _check(
    model: Any, missing: set[str], unexpected: set[str], mismatched: dict[str, list[Any]]
) -> None:
    """Raise ValueError if there is a tensor in any of these sets."""
    problems = []
    if missing:
        total, verb = len(model.state_dict()), "is" if len(missing) == 1 else "are"
        problems.append(f"{len(missing)} of {total} tensors {verb} missing: {listed(missing)}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {listed(unexpected)}")
    if mismatched:
        shapes = [
            f"{name} {tuple(stored)} instead of {tuple(wanted)}"
            for name, (stored, wanted) in sorted(mismatched.items())
        ]
        problems.append(f"{len(shapes)} of another shape: {listed(shapes)}")
    if problems:
        name = type(model).__name__
        advice = _advice(missing, unexpected)
        raise ValueError(f"its weights do not fit {name}: {'; '.join(problems)}: {advice}")


def _advice(missing: set[str], unexpected: set[str]) -> str:
    unwrapped = unwrapping(unexpected)
    if unwrapped is not None:
        return unwrapped
    if missing == {"lm_head.weight"} and not unexpected:
        return "set tie_word_embeddings in config.json if the embeddings are the head, too"
    first = min(unexpected, default="")
    prefixes = [first.removesuffix(name) for name in missing if first.endswith(f".{name}")]
    if prefixes:
        return f"the names have the prefix {min(prefixes, key=len)}: save the model without it"
    return _REFETCH
