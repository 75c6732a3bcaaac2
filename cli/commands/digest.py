"""`warmd jobs --since`: what happened since a time, as text, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from ...daemon.lifecycle.statuses import ENDED
from ...jobs.intervals import interval_words
from ..shared.app import App
from ..view import render
from ..view.times import parse_past
from .sweep import score_of, values_of

if TYPE_CHECKING:
    from ...daemon.reports.digest import Digest, Group, Line

_GROUPS = "Sweeps and curricula"


def show_digest(app: App, since: str, *, markdown: bool) -> None:
    """Print what happened since a point in time. Works without a daemon.

    Training jobs that finished, failed or were stopped, with their evaluations; interruptions and
    the time that they cost; running jobs with their estimated end; sweeps with their best values;
    curricula with their decisions; and the free disk space.
    """
    from ...daemon.reports.digest import digest as digest_of

    begin = parse_past("since", since, now=datetime.now().astimezone())
    found = digest_of(app.reader(), since=begin.timestamp())
    if app.as_json:
        render.json_line(asdict(found))
        return
    for line in _markdown(found) if markdown else _text(found):
        click.echo(line)


def _text(found: Digest) -> Iterator[str]:
    yield f"From {render.moment(found.since)} to {render.moment(found.until)}: {_counts(found)}"
    for title, lines in _sections(found):
        yield ""
        yield click.style(title, bold=True)
        for line in lines:
            yield "  " + "  ".join(_words(line))
    if found.groups:
        yield ""
        yield click.style(_GROUPS, bold=True)
        for group in found.groups:
            yield "  " + "  ".join(_group_words(group))
    yield ""
    yield _rest(found)


def _markdown(found: Digest) -> Iterator[str]:
    yield f"# warmd: {render.moment(found.since)} to {render.moment(found.until)}"
    yield ""
    yield f"{_counts(found)}."
    for title, lines in _sections(found):
        yield from ("", f"## {title}", "")
        for line in lines:
            job_id, *words = _words(line)
            yield f"- `{job_id}` " + ", ".join(map(_escaped, words))
    if found.groups:
        yield from ("", f"## {_GROUPS}", "")
        for group in found.groups:
            group_id, *words = _group_words(group)
            yield f"- `{group_id}` " + ", ".join(map(_escaped, words))
    yield ""
    yield f"{_rest(found)}."


def _counts(found: Digest) -> str:
    """The number of jobs by outcome."""
    statuses = [line.status for line in found.ended]
    counts = [f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)]
    return ", ".join([*counts, f"{len(found.pending)} running or waiting"])


def _sections(found: Digest) -> Iterator[tuple[str, list[Line]]]:
    """The jobs by their end; those that failed first."""
    statuses = sorted({line.status for line in found.ended}, key=lambda s: (s != "failed", s))
    for status in statuses:
        yield status.capitalize(), [line for line in found.ended if line.status == status]
    if found.pending:
        yield "Running or waiting", list(found.pending)


def _words(line: Line) -> list[str]:
    """A job in words: id, name, progress, result, reason, interruptions."""
    words = [line.id]
    if line.name:
        words.append(render.one_line(line.name))
    if line.status not in ENDED:
        words.append(line.status)
    if line.steps_total:
        words.append(f"step {line.step}/{line.steps_total}")
    if line.ends_at is not None:
        words.append(f"until {render.clock(line.ends_at)}")
    if (found := line.evaluation) is not None:
        change = "" if found.before is None else f"{render.number(found.before)} -> "
        words.append(f"{found.metric} {change}{render.number(found.value)}")
        if found.low is not None and found.high is not None:
            interval = interval_words(found.low, found.high, ".3f")
            words.append(f"95 % interval {interval} (n {found.n})")
        if found.unscored:
            words.append(f"unscored: {found.unscored} of {found.completions}")
    elif line.metric is not None and line.value is not None:
        words.append(f"{line.metric} {render.number(line.value)}")
    if line.error:
        words.append(render.one_line(line.error))
    if line.interruptions:
        cost = render.duration(line.lost_s)
        how_often = "once" if line.interruptions == 1 else f"{line.interruptions} times"
        words.append(f"interrupted {how_often}, which cost {cost}")
    return words


def _group_words(group: Group) -> list[str]:
    """A sweep or a curriculum in words: id, name, status, the best values or the decisions."""
    words = [group.id]
    if group.name:
        words.append(render.one_line(group.name))
    words.append(group.status)
    if group.problem:
        words.append(render.one_line(group.problem))
    if group.best is not None:
        words.append(f"best {values_of(group.best)}  {group.metric} {score_of(group.best)}")
    if group.decisions:
        words += [f"{name} {times}x" for name, times in group.decisions.items()]
    if group.model is not None:
        words.append(f"model {group.model}")
    return words


def _rest(found: Digest) -> str:
    return f"{found.answers} answers; {render.size(found.disk_free_bytes)} of disk free"


def _escaped(text: str) -> str:
    """Text escaped for Markdown."""
    return "".join(f"\\{c}" if c in r"\`*_{}[]<>#|" else c for c in text)
