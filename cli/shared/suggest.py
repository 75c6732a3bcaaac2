"""Did you mean: suggestions for commands and options that do not exist."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# Commands of other tools, and words that come to mind, with warmd's own.
HABITS = {
    "ask": "run",
    "attach": "tail",
    "complete": "run",
    "delete": "rm",
    "down": "stop",
    "follow": "tail",
    "generate": "run",
    "help": "--help",
    "history": "jobs",
    "info": "show",
    "inspect": "show",
    "list": "jobs",
    "log": "logs",
    "ls": "jobs",
    "ps": "queue",
    "pull": "load",
    "remove": "rm",
    "sacct": "jobs",
    "sbatch": "submit",
    "scancel": "cancel",
    "squeue": "queue",
    "serve": "start",
    "top": "queue",
    "train": "submit",
    "up": "start",
    "version": "--version",
    "wait": "tail",
    "watch": "tail",
}

# Options of TRL, transformers and Slurm whose names here are others.
OPTION_HABITS = {
    "bs": "batch-size",
    "config-file": "config",
    "data": "dataset",
    "dataset": "data",
    "dependency": "after",
    "gradient-accumulation-steps": "gradient-accumulation",
    "lr": "learning-rate",
    "max-new-tokens": "max-tokens",
    "max-seq-length": "seq-len",
    "max-steps": "steps",
    "model-name-or-path": "model",
    "num-samples": "samples",
    "num-train-epochs": "epochs",
    "lora-r": "lora",
    "per-device-train-batch-size": "batch-size",
    "reward-funcs": "reward",
    "save-steps": "save-every",
    "eval-steps": "eval-every",
    "time": "timeout",
    "use-peft": "lora",
    "wd": "weight-decay",
}

_CLOSE = 0.6
_NEARLY = 0.7  # `lits` for `list`, but not the name `first`
_MOST = 3


def commands(name: str, known: Iterable[str]) -> list[str]:
    """Return the commands that may be meant by `name`, the likeliest first."""
    known = list(known)
    if HABITS.get(name) in known:
        return [HABITS[name]]
    return _close(name, known)


def is_misspelt(word: str, known: Iterable[str]) -> bool:
    """Return whether a word is so similar to a known one that it is hardly a name of its own."""
    return bool(_close(word, list(known), cutoff=_NEARLY))


def options(flag: str, known: Sequence[str]) -> list[str]:
    """Return the options (`--name`) that may be meant by `flag`, the likeliest first."""
    name = flag.lstrip("-").replace("_", "-")
    names = [option.lstrip("-") for option in known if option.startswith("--")]
    if name in names:  # typed with underscores
        return [f"--{name}"]
    if OPTION_HABITS.get(name) in names:
        return [f"--{OPTION_HABITS[name]}"]
    return [f"--{found}" for found in _close(name, names)]


def sentence(found: Sequence[str]) -> str:
    """Return ` Did you mean A or B?`, or nothing for nothing."""
    return f" Did you mean {' or '.join(map(repr, found))}?" if found else ""


def _close(name: str, known: Sequence[str], *, cutoff: float = _CLOSE) -> list[str]:
    import difflib

    return difflib.get_close_matches(name, known, n=_MOST, cutoff=cutoff)
