"""warmd: a persistent warm-model daemon with a job queue.

    import warmd

    session = warmd.connect()
    job = session.submit("grpo", samples=80, eval_samples=200)
    print(job.result()["reward_after"])
    print(session.complete("17+58="))

`connect` is described in its docstring, and in docs/python.md. Names are imported on first use, so
that the command line does not load what it does not need. Nothing here imports torch.
"""

from importlib import import_module as _import_module

TYPE_CHECKING = False  # not from typing, whose import costs each command 3 ms
if TYPE_CHECKING:
    from .daemon.api.curriculum import Curriculum
    from .daemon.api.job import Job
    from .daemon.api.session import Session, connect
    from .daemon.api.sweep import Sweep
    from .jobs.errors import Conflict, JobFailed, NotFound, SpecError, Unavailable, WarmdError

__version__ = "0.1.0"

__all__ = [
    "Conflict",
    "Curriculum",
    "Job",
    "JobFailed",
    "NotFound",
    "Session",
    "SpecError",
    "Sweep",
    "Unavailable",
    "WarmdError",
    "__version__",
    "connect",
]

_MODULES = {"connect": "daemon.api.session", "Session": "daemon.api.session"} | {
    "Curriculum": "daemon.api.curriculum",
    "Job": "daemon.api.job",
    "Sweep": "daemon.api.sweep",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(_import_module(f".{_MODULES.get(name, 'jobs.errors')}", __name__), name)
    return found


def __dir__() -> list[str]:
    return __all__
