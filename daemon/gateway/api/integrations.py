"""`integrations` of a fine-tuning request: Weights & Biases, where the daemon is set up for it.

A request cannot make a job report to a third party: the setting `defaults.KIND.report_to` does. The
request may say that it expects this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ....configs.config import DaemonConfig
from ....jobs.errors import SpecError

_DEFAULT_PROJECT = "huggingface"  # of transformers, without WANDB_PROJECT


def check(given: Sequence[Mapping[str, Any]] | None, kind: str, config: DaemonConfig) -> None:
    """Check that jobs of a kind report to the tracker that a request names. Raises SpecError."""
    for index, item in enumerate(given or ()):
        where = f"integrations[{index}]"
        if item.get("type") != "wandb":
            raise SpecError(f"{where}.type", f"must be wandb, got {str(item.get('type'))[:80]!r}")
        configured = config.defaults.get(kind, {}).get("report_to", ())
        trackers = configured if isinstance(configured, list | tuple) else [configured]
        if "wandb" not in trackers:
            raise SpecError(
                where,
                f"must be configured: set report_to: [wandb] in defaults.{kind} of the daemon",
            )
        _check_wandb(item.get("wandb"), f"{where}.wandb")


def _check_wandb(settings: Any, where: str) -> None:
    if not isinstance(settings, Mapping):
        raise SpecError(where, "must be an object with a project")
    project = os.environ.get("WANDB_PROJECT", _DEFAULT_PROJECT)
    if settings.get("project") != project:
        raise SpecError(
            f"{where}.project",
            f"must be {project!r} (WANDB_PROJECT of the daemon), "
            f"got {str(settings.get('project'))[:80]!r}",
        )
    for name, value in settings.items():
        if name != "project" and value:
            raise SpecError(f"{where}.{name[:80]}", "unknown or not supported")
