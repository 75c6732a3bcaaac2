"""The process of `warmd checkpoints verify --trl`: trains the first steps of a job on both sides.

    python -m warmd.daemon.fork.verify_trl < REQUEST

REQUEST: {"run_dir", "model", "folder", "scratch", "steps"} in one line of JSON: the job, its model
with its folder, an empty folder in HOME/cache. The process ends when the pipe is closed. Prints
lines of JSON: {"progress": …} several times, then {"found": …} or {"error": …}.
Imports torch and trl.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from ...configs.config import ModelConfig
from ...jobs import spec_class
from ...jobs.context import WarmModel
from ...jobs.errors import WarmdError
from ...jobs.user_code import tracebacks
from ...jobs.user_code.modules import own_modules
from ..runs.rundir import RunDir
from .reading import blaming, read


def main() -> None:
    """Read the request, run it and print its result."""
    # What rewards print must not be read as a result.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def put(**fields: Any) -> None:
        out.write(orjson.dumps(fields) + b"\n")

    put(progress="importing torch and trl: takes some seconds")
    request = orjson.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    try:
        put(found=_found(request, lambda text: put(progress=text)))
    except WarmdError as error:
        put(error=str(error))
    except Exception as error:
        sys.stderr.write(tracebacks.trace(error))
        put(error=tracebacks.reason(error))


def _end_with_the_caller() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def _found(request: dict[str, Any], report: Callable[[str], None]) -> dict[str, Any]:
    from ...jobs.verify_trl.training import verify

    rundir = RunDir(Path(request["run_dir"]))
    config, folder = ModelConfig(**request["model"]), Path(request["folder"])
    document = rundir.read_spec()

    def read_model() -> WarmModel:
        with blaming(config, folder):
            return read(config, folder, may_pack=False)

    code_folders = document.get("python_path", ())
    with own_modules(code_folders):
        return verify(
            spec_class(document["kind"]).parse(document["spec"]),
            read_model,
            job_id=document["id"],
            scratch=Path(request["scratch"]),
            rules=document.get("rules", 0),
            code_folders=code_folders,
            steps=request["steps"],
            report=report,
        )


if __name__ == "__main__":
    main()
