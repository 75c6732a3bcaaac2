"""A job's process imports nothing that the zygote could have imported before the fork."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from daemons import Daemon

from warmd.jobs import spec_class

REWARD = """
import json, sys, pathlib
def write(completions, **kwargs):
    pathlib.Path({path!r}).write_text(json.dumps(sorted(sys.modules)))
    return [float(len(text) % 3) for text in completions]
"""
ZYGOTE = """
import json, os, sys
from warmd.daemon.fork import libraries, zygote
os.environ.update(libraries.ENVIRONMENT)
libraries.import_libraries()
print(json.dumps(sorted(sys.modules)))
"""
FORK = """
import os, resource
from warmd.jobs.user_code.modules import digests, own_modules
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
gc.freeze()
if os.fork() == 0:
    begun = faults()
    with own_modules([sys.argv[1]]):
        entered = faults()
        import job_code
        imported = faults()
        files = digests()
    touched = entered - begun + faults() - imported
    print(json.dumps([touched, list(files), "job_code" in sys.modules]), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
def test_a_grpo_job_imports_no_module_but_its_own(shared_daemon: Daemon, tmp_path: Path):
    seen = tmp_path / "seen.json"
    (tmp_path / "mods.py").write_text(REWARD.format(path=str(seen)))
    options = {"model": "tiny", "samples": 2, "num_generations": 2, "max_completion_length": 4}
    with contextlib.chdir(tmp_path):
        spec = spec_class("grpo").parse({**options, "reward": ["mods:write"]})
        job_id = shared_daemon.client.submit(spec)
    assert shared_daemon.wait(job_id)["status"] == "finished"
    known = set(json.loads(lines_of(ZYGOTE)[-1]))
    late = [name for name in json.loads(seen.read_text()) if name not in known]
    assert [name for name in late if name.startswith(("warmd.jobs", "torch", "trl"))] == []


@pytest.mark.slow
def test_the_modules_of_a_job_are_found_without_touching_those_of_the_zygote(tmp_path: Path):
    (tmp_path / "job_code.py").write_text("x = 1")
    faults, files, is_loaded = json.loads(lines_of("import gc" + ZYGOTE + FORK, tmp_path)[-1])
    assert files == [str(tmp_path / "job_code.py")]
    assert not is_loaded
    # Each module that is touched copies a page of memory; there are about 4,000 modules.
    assert faults < 1000


def lines_of(script: str, *arguments: Path) -> list[str]:
    """The lines that a script prints in a Python of its own."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, stdout=-1, text=True, check=True).stdout.splitlines()
