"""A job's process imports nothing that the zygote could have imported before the fork."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from daemons import Daemon

from warmd.jobs import spec_class

REWARD = """
import json, sys, pathlib
def write(completions, **kwargs):
    pathlib.Path({path!r}).write_text(json.dumps(sorted(sys.modules)))
    return [float(len(text) % 3) for text in completions]
"""
# Prints the modules of a zygote, and what a fork of it does with those of a job.
ZYGOTE = """
import gc, json, os, resource, sys
from warmd.daemon.fork import libraries, zygote
os.environ.update(libraries.ENVIRONMENT)
libraries.import_libraries()
print(json.dumps(sorted(sys.modules)), flush=True)
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


class Zygote(NamedTuple):
    """What a zygote and its fork have printed."""

    modules: set[str]
    job_code: Path
    faults: int  # pages that the fork has touched to find the modules of the job
    files: list[str]  # that it has found
    is_loaded: bool  # in the end


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Zygote:
    folder = tmp_path_factory.mktemp("job")
    (folder / "job_code.py").write_text("x = 1")
    command = [sys.executable, "-c", ZYGOTE, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    modules, forked = map(json.loads, done.stdout.splitlines()[-2:])
    return Zygote(set(modules), folder / "job_code.py", *forked)


@pytest.mark.nightly(
    part="daemons", catches="a module that every job imports because the zygote has not"
)
def test_a_grpo_job_imports_no_module_but_its_own(daemon: Daemon, tmp_path: Path, zygote: Zygote):
    # In a daemon of its own: the zygote of one in which other tests have loaded models has more.
    seen = tmp_path / "seen.json"
    (tmp_path / "mods.py").write_text(REWARD.format(path=str(seen)))
    options = {"model": "tiny", "samples": 2, "num_generations": 2, "max_completion_length": 4}
    with contextlib.chdir(tmp_path):
        spec = spec_class("grpo").parse({**options, "reward": ["mods:write"]})
        job_id = daemon.client.jobs.submit(spec)
    assert daemon.wait(job_id)["status"] == "finished"
    late = [name for name in json.loads(seen.read_text()) if name not in zygote.modules]
    assert [name for name in late if name.startswith(("warmd.jobs", "torch", "trl"))] == []


@pytest.mark.slow
def test_the_modules_of_a_job_are_found_without_touching_those_of_the_zygote(zygote: Zygote):
    assert zygote.files == [str(zygote.job_code)]
    assert not zygote.is_loaded
    # Each module that is touched copies a page of memory; there are about 4,000 modules.
    assert zygote.faults < 1000
