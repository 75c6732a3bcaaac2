"""The documents against the code: generated tables are current, commands and links exist.

`python tests/project/test_docs.py` regenerates the tables in docs/.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from warmd.cli.main import COMMANDS, warmd
from warmd.cli.shared.app import App
from warmd.configs.config import SETTINGS
from warmd.jobs import KINDS, spec_class
from warmd.jobs.rewards.rewards import parse, resolve

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FOLDERS = ("cli", "configs", "daemon", "deploy", "docs", "jobs", "src", "tests")
MANUAL = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [
    README,
    *MANUAL,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md")),
]
MAX_README_LINES = 200


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# --- The tables ---------------------------------------------------------------------------------


def commands() -> list[str]:
    rows = []
    for name, (_, about) in COMMANDS.items():
        command = command_of(name)
        usage = [name, *(p.make_metavar(click.Context(command)) for p in arguments(command))]
        if isinstance(command, click.Group):
            usage.append(command.subcommand_metavar.split()[0])
        rows.append([code(" ".join(["warmd", *usage])), about, own_options(command)])
    return table(["Command", "What it does", "Options of its own"], rows)


def submit() -> list[str]:
    kind = next(iter(KINDS))
    known = {*spec_class(kind).options(), *common_names()}
    options = [option for option in options_of(kind_command(kind)) if option.name not in known]
    return table(["Option", "What it does"], [[spelt(o), plain(o.help)] for o in options])


def settings() -> list[str]:
    rows = [
        [code(s.name), code(s.variable) if s.variable else "", code(s.default), s.help]
        for s in SETTINGS
    ]
    return table(["Key", "Variable", "Default", "What it is"], rows)


def kind_options(kind: str) -> list[str]:
    options = {option.name: option for option in options_of(kind_command(kind))}
    rows = []
    for name, info in spec_class(kind).options().items():
        if info.former is not None:
            continue
        about, default = plain(options[name].help).rstrip("]").rsplit("default: ", 1)
        what, _, takes = about.rstrip("; [").partition("  [")
        rows.append(
            [
                spelt(options[name]),
                what + (f" ({takes})" if takes else ""),
                default if info.default_text else code(default),
            ]
        )
    return table(["Option", "What it is", "Default"], rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    "settings": settings,
    "commands": commands,
    "submit": submit,
    **{kind: partial(kind_options, kind) for kind in KINDS},
}


def table(headers: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [headers, ["---"] * len(headers), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]


def filled(text: str, name: str) -> str:
    """Return a document with one table regenerated."""
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"{begin.strip()} must be followed by {end.strip()}"
    return before + begin + "\n".join([*TABLES[name](), ""]) + end + after


def document_of(name: str) -> Path:
    """Return the page of the manual that has a table."""
    (path,) = (path for path in MANUAL if f"<!-- begin: {name} -->" in read(path))
    return path


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_manual_match_the_code(name):
    text = read(document_of(name))
    assert filled(text, name) == text, "regenerate it: python tests/project/test_docs.py"


def test_readme_is_short_and_names_every_page_of_the_manual():
    text = read(README)
    assert len(text.splitlines()) <= MAX_README_LINES
    assert [page.name for page in MANUAL if f"(docs/{page.name})" not in text] == []


def test_option_names_in_the_manual_exist():
    known = {
        name
        for command in every_command()
        for option in options_of(command)
        for name in (*option.opts, *option.secondary_opts)
    }
    for page in [README, *MANUAL]:
        # Inline code only: fenced commands are parsed as a whole.
        prose = re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)
        named = set(re.findall(r"(?<=`)(--[a-z][a-z0-9-]*)", prose))
        assert named - known - {"--help"} == set(), page.name


# --- Commands and options, as click has them ----------------------------------------------------


def command_of(name: str) -> click.Command:
    command = warmd.get_command(click.Context(warmd), name)
    assert command is not None
    return command


def kind_command(kind: str) -> click.Command:
    group = command_of("submit")
    assert isinstance(group, click.Group)
    command = group.get_command(click.Context(group), kind)
    assert command is not None
    return command


def every_command() -> Iterator[click.Command]:
    for name in COMMANDS:
        command = command_of(name)
        yield command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                assert found is not None
                yield found


def options_of(command: click.Command) -> list[click.Option]:
    return [p for p in command.params if isinstance(p, click.Option)]


def arguments(command: click.Command) -> list[click.Argument]:
    return [p for p in command.params if isinstance(p, click.Argument)]


def common_names() -> set[str]:
    return {option.name or "" for option in options_of(warmd)} - {"version"}


def own_options(command: click.Command) -> str:
    options = [o for o in options_of(command) if o.name not in common_names()]
    return ", ".join(code(option.opts[-1]) for option in options)


def spelt(option: click.Option) -> str:
    """An option as it is typed: `--samples N`, `--chat-template`."""
    flag = option.opts[-1] + (f" {option.metavar}" if option.metavar else "")
    return code("/".join([flag, *option.secondary_opts]))


def code(text: str) -> str:
    return f"`{text}`"


def plain(text: str | None) -> str:
    assert text is not None
    # In a document, what goes by a name of the code is set as code.
    return re.sub(r"(?<![`\w])(\w+_\w+)(?![`\w])", r"`\1`", text)


# --- Links, files and examples -----------------------------------------------------------------


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language in a document."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def command_lines() -> Iterator[Any]:
    for path in DOCUMENTS:
        for block in blocks(read(path), "(?:sh)?"):
            for line in block.replace("\\\n", " ").splitlines():
                # Also in $(…) and after `podman exec NAME`, up to a pipe or a comment.
                typed = re.search(r"(?:^|\$\(|exec \w+ )(warmd [a-z][^|)#]*)", line)
                if typed:
                    yield pytest.param(typed[1], id=f"{path.relative_to(ROOT)}: {typed[1].strip()}")


@pytest.mark.parametrize("line", list(command_lines()))
def test_every_command_in_the_documents_can_be_typed(line):
    _, name, *rest = shlex.split(line)
    command = command_of(name)
    is_of_kind = name == "submit" and rest[0] in KINDS
    if is_of_kind:
        kind, *rest = rest
        command = kind_command(kind)
    # Parses as the shell's words would be; a wrong option or value raises.
    given = command.make_context(name, rest, obj=App()).params
    if is_of_kind:
        options = spec_class(kind).options()
        values = {k: v for k, v in given.items() if k in options and v not in (None, ())}
        spec_class(kind).parse(values)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_in_the_documents_leads_somewhere(path):
    links = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", read(path))
    wrong = []
    for link, anchor in links:
        target = path.parent / link if link else path
        if not target.exists() or (anchor and anchor not in anchors(read(target))):
            wrong.append(f"{link}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize("path", DOCUMENTS[:-2], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_source_file_that_a_document_names_exists(path):
    folders = "|".join(FOLDERS)
    named = set(re.findall(rf"`((?:{folders})/[\w./-]*|\w+/test_\w+\.py)`", read(path)))
    assert [
        name
        for name in sorted(named)
        if "NAME" not in name and not any((base / name).exists() for base in (ROOT, ROOT / "tests"))
    ] == []


def test_the_files_and_folders_of_the_readme_and_the_guide_exist():
    tree = re.search(r"## Repository layout\n\n```\n(.*?)```", read(README), re.DOTALL)
    assert tree is not None
    shown = [line.split()[0].rstrip("/") for line in tree[1].splitlines()]
    assert sorted(shown) == sorted(FOLDERS)
    tracked = {file.name for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    named = set(re.findall(r"`(\w+\.py)`", read(ROOT / "CONTRIBUTING.md")))
    assert named
    assert sorted(named - tracked - {"test_NAME.py"}) == []


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_reward_of_the_manual_scores(tmp_path, monkeypatch):
    manual = read(ROOT / "docs" / "grpo.md")
    (example,) = (block for block in blocks(manual, "python") if "def nearness" in block)
    (tmp_path / "mine_in_the_manual.py").write_text(example, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    nearness: Any = resolve(parse("mine_in_the_manual:nearness"))
    scores = nearness(["1+1="] * 4, ["2", " 4", "99", "two"], ["2"] * 4)
    assert scores == pytest.approx([1.0, 0.8, 0.0, 0.0])


if __name__ == "__main__":
    for table_name in TABLES:
        page_path = document_of(table_name)
        page_path.write_text(filled(read(page_path), table_name), encoding="utf-8")
