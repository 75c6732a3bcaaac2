"""The raw options of a job, from the command line, files and other jobs.

Values reach `Spec.parse` as they were typed, so that an option, `--set` and a file are read by the
same rules and fail with the same words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...jobs import spec_class
from ...jobs.errors import SpecError
from .app import App

if TYPE_CHECKING:
    from ...daemon.client.client import Client
    from ...daemon.client.jobs import Template
    from ...daemon.runs.weights import Weights
    from ...jobs.spec import OptionInfo


def described(
    app: App,
    client: Client,
    kind: str,
    given: Mapping[str, Any],
    *,
    config_file: Path | None,
    settings: Iterable[str],
    like: str | None,
    init_from: str | None,
) -> tuple[dict[str, Any], Weights | None]:
    """Return the raw options of a job, and the weights that it starts from, if any."""
    base = None if like is None else client.jobs.template(like, kind)
    values = gathered(app, kind, given, config_file, settings, base=base)
    init = None
    if init_from is not None:
        if given.get("model") is not None:
            raise SpecError("init_from", "must not be given together with --model")
        init = client.models.weights(init_from, kind)
    elif base is not None and base.init_from is not None and "model" not in values:
        init = client.models.weights(base.init_from)
    if init is not None:
        values["model"] = init.name
    return values, init


def gathered(
    app: App,
    kind: str,
    given: Mapping[str, Any],
    config_file: Path | None,
    settings: Iterable[str],
    *,
    base: Template | None = None,
) -> dict[str, Any]:
    """Return the raw options of a spec from all sources; later sources take precedence.

    `base`: replaces the defaults of the home.
    """
    return {
        **(app.config().defaults.get(kind, {}) if base is None else base.options),
        **_from_file(config_file),
        **from_settings(settings, spec_class(kind).options()),
        # click gives None for options that were not given, () for repeatable ones.
        **{name: value for name, value in given.items() if value is not None and value != ()},
    }


def _from_file(path: Path | None) -> dict[str, Any]:
    """Read options from a YAML file. Raises ConfigError with the file and line."""
    if path is None:
        return {}
    from ...configs.yamlfile import read_mapping

    return {_field(name): value for name, value in read_mapping(path).items()}


def from_settings(
    settings: Iterable[str], options: Mapping[str, OptionInfo]
) -> dict[str, str | tuple[str, ...]]:
    """Read `KEY=VALUE`, as text. A key that takes a list may be repeated, another one may not."""
    values: dict[str, str | tuple[str, ...]] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise SpecError("set", f"must be KEY=VALUE, got {setting!r}")
        name = _field(key)
        if name in options and options[name].many:
            values[name] = (*values.get(name, ()), value)
        elif name in values:
            raise SpecError(name, "must be set once, got --set twice")
        else:
            values[name] = value
    return values


def _field(name: object) -> str:
    return str(name).strip().replace("-", "_")
