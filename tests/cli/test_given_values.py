"""Empty and very long values of every argument and option: refused in one short line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from warmd.cli.main import main, warmd

TEXTS = ("prompt", "prompts", "messages", "system", "template", "text")  # may be empty
TYPED = (click.types.StringParamType, click.Path)
LONG = "x" * 5000


def values() -> Iterator[tuple[str, list[str]]]:
    """Every argument and option that takes a name, a path or text, in a command line.

    An option of several job kinds once for each command that has it.
    """
    seen = set()
    for words, command in commands(warmd, []):
        needed = {p: _words(p, "x") for p in command.params if p.required}
        for parameter in command.params:
            key = (words[0], parameter.name)
            if isinstance(parameter.type, TYPED) and key not in seen:
                seen.add(key)
                given = {**needed, parameter: _words(parameter, VALUE)}
                ordered = sorted(given, key=command.params.index)
                yield str(parameter.name), [*words, *(w for p in ordered for w in given[p])]


def _words(parameter: click.Parameter, value: str) -> list[str]:
    return [value] if isinstance(parameter, click.Argument) else [parameter.opts[0], value]


def commands(command: click.Command, words: list[str]) -> Iterator[tuple[list[str], click.Command]]:
    if not isinstance(command, click.Group):
        yield words, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from commands(found, [*words, name])


VALUE = "{}"
EVERY = list(values())


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without a daemon, and an empty working directory."""
    monkeypatch.setenv("WARMD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def test_an_empty_name_or_path_is_refused_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert len(EVERY) > 150
    wrong = []
    for name, words in EVERY:
        if name in TEXTS or name == "argument":
            continue
        code = main(["" if word == VALUE else word for word in words])
        said = capsys.readouterr().err
        if code != 2 or not re.fullmatch(r"Error: [\w.]+: must be .*, got ''\n", said):
            wrong.append((words, code, said))
    assert wrong == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_no_error_repeats_a_long_value(capsys: pytest.CaptureFixture[str]):
    wrong = []
    for _, words in EVERY:
        if words[0] == "bench":  # it measures
            continue
        main([LONG if word == VALUE else word for word in words])
        said = capsys.readouterr().err
        if len(said) > 1200:
            wrong.append((words, said[:200]))
    for words in ([LONG], ["queue", LONG], ["jobs", "--kind", LONG], ["status", f"--{LONG}"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert len(said) < 1200
        assert "characters left out" in said
    assert wrong == []
