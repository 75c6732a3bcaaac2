"""Jobs as small HTML views for notebooks. All text from outside is escaped."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..runs.estimate import Estimate
from .progress import share_of, words_of

_COLORS = {"finished": "#2a7", "started": "#2a7", "failed": "#c33"}
_STYLE = "font-family:monospace;font-size:90%"


def job_html(info: Mapping[str, Any], progress: Estimate, now: float) -> str:
    """Return a job in two lines: id, name and status; progress bar and words, or the error."""
    words = [f"<b>{escape(info['id'])}</b>", _labels(info), _status(info)]
    share = share_of(progress)
    bar = "" if share is None else f'<progress value="{share:.4f}" max="1"></progress> '
    below = info["error"] or info["problem"]
    text = escape(str(below)) if below else bar + escape(words_of(progress, now))
    return f'<div style="{_STYLE}">{" ".join(filter(None, words))}<br>{text}</div>'


def table_html(infos: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of jobs."""
    head = ("job", "name", "model", "status", "step", "created")
    rows = [
        (
            escape(info["id"]),
            _labels(info),
            escape(str(info["model"] or "")),
            _status(info),
            f"{info['step']}/{info['steps_total']}" if info["steps_total"] else "",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(info["created_at"])),
        )
        for info in infos
    ]
    return _table(head, rows)


def columns_html(caption: str, columns: Mapping[str, Sequence[Any]]) -> str:
    """Return a table of columns of equal length."""
    rows = [[_cell(value) for value in row] for row in zip(*columns.values(), strict=True)]
    return _table([escape(name) for name in columns], rows, escape(caption))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Return a table of cells that are HTML."""
    titles = "".join(f"<th>{title}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    title = f"<caption>{caption}</caption>" if caption else ""
    body = f"{title}<thead><tr>{titles}</tr></thead><tbody>{lines}</tbody>"
    return f'<table style="{_STYLE}">{body}</table>'


def _labels(info: Mapping[str, Any]) -> str:
    words = [info["name"], *(f"#{tag}" for tag in info["tags"])]
    return escape(" ".join(word for word in words if word))


def _status(info: Mapping[str, Any]) -> str:
    status = "paused" if info["paused"] else str(info["status"])
    return f'<span style="color:{_COLORS.get(status, "inherit")}">{escape(status)}</span>'
