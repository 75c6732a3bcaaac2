"""A job's process imports nothing that the zygote could have imported for all."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

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


def test_a_grpo_job_imports_no_module_but_its_own(shared_daemon: Daemon, tmp_path: Path):
    seen = tmp_path / "seen.json"
    (tmp_path / "mods.py").write_text(REWARD.format(path=str(seen)))
    options = {"model": "tiny", "samples": 2, "num_generations": 2, "max_completion_length": 4}
    with contextlib.chdir(tmp_path):
        spec = spec_class("grpo").parse({**options, "reward": ["mods:write"]})
        job_id = shared_daemon.client.submit(spec)
    assert shared_daemon.wait(job_id)["status"] == "finished"
    done = subprocess.run([sys.executable, "-c", ZYGOTE], stdout=-1, text=True, check=True)
    known = set(json.loads(done.stdout.splitlines()[-1]))
    late = [name for name in json.loads(seen.read_text()) if name not in known]
    assert [name for name in late if name.startswith(("warmd.jobs", "torch", "trl"))] == []
