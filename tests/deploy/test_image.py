"""The container image: it has everything that warmd needs, and its commands exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import click

from warmd.cli.main import warmd
from warmd.configs.config import DaemonConfig
from warmd.configs.ownership import is_single_user

ROOT = Path(__file__).parents[2]
CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text()


def copied() -> set[str]:
    """The top-level names of the checkout that are copied."""
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", CONTAINERFILE, re.MULTILINE)
    return {Path(name).parts[0] for line in lines for name in line.split()}


def test_copied_files_exist_and_are_not_ignored():
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line]
    assert "*" in ignore
    assert {line.removeprefix("!") for line in ignore if line.startswith("!")} == copied()
    assert all((ROOT / name).exists() for name in copied())
    # All that the package is built from.
    links = {path.name for path in (ROOT / "src" / "warmd").iterdir() if path.is_symlink()}
    assert links | {"src", "pyproject.toml", "README.md", "LICENSE"} <= copied()


def test_its_commands_exist_and_it_is_not_root():
    start = json.loads(re.findall(r"^CMD (.*)$", CONTAINERFILE, re.MULTILINE)[0])
    (health,) = re.findall(r"^HEALTHCHECK .*CMD (.*)$", CONTAINERFILE, re.MULTILINE)
    with click.Context(warmd) as context:
        for name, *arguments in (start, json.loads(health)[1:]):
            command = warmd.get_command(context, name)
            assert command is not None
            command.make_context(name, arguments)
    assert re.findall(r"^USER (.*)$", CONTAINERFILE, re.MULTILINE) == ["1000:1000"]


def test_it_accepts_volumes_of_any_owner_and_mode():
    variables = re.findall(r"(\w+)=(\S+)", "\n".join(re.findall(r"^ENV .*$", CONTAINERFILE, re.M)))
    assert is_single_user(dict(variables))


def test_compose_and_the_manual_give_jobs_time_to_save(tmp_path):
    grace_s = DaemonConfig(home=tmp_path).stop_grace_s
    manual = (ROOT / "deploy" / "README.md").read_text()
    compose = (ROOT / "deploy" / "compose.yaml").read_text()
    found = re.findall(r"--stop-timeout (\d+)", manual)
    found += re.findall(r"stop_grace_period: (\d+)s", compose)
    assert len(found) >= 3
    assert all(int(seconds) > grace_s for seconds in found)


def test_the_scripts_are_valid_bash():
    for script in (ROOT / "deploy" / "slurm" / "node.sbatch", ROOT / ".ci" / "run"):
        subprocess.run(["bash", "-n", str(script)], check=True)
