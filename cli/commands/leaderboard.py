"""`warmd jobs --kind eval --best DATASET`: all evaluations of a data set, best first."""

from __future__ import annotations

from dataclasses import asdict

from ...jobs.eval.summary import count_words
from ...jobs.intervals import interval_words
from ..shared.app import App
from ..shared.names import model_names
from ..view import render


def show_leaderboard(app: App, dataset: str) -> None:
    """Print all evaluations on `dataset`, best first. Needs no daemon.

    A data set is identified by its content: a copy under another name has the same evaluations.
    Evaluations with different tasks or numbers of questions are ranked separately. Each one is
    compared with the best, question by question.
    """
    from ...daemon.reports.leaderboard import leaderboard as leaderboard_of

    client = app.reader()
    entries = leaderboard_of(client, dataset)
    if app.as_json:
        for entry in entries:
            render.json_line(asdict(entry))
        return
    models = model_names(client, (entry.model for entry in entries))
    rows = [
        [
            str(entry.rank),
            render.one_line(models[entry.model]),
            entry.task,
            entry.metric,
            f"{entry.value:.4g}",
            interval_words(entry.low, entry.high),
            count_words(entry.n, entry.unscored, entry.completions),
            entry.job,
            "" if entry.against_best is None else entry.against_best.words,
        ]
        for entry in entries
    ]
    headers = ["TASK", "METRIC", ">VALUE", "95 % INTERVAL", ">N", "JOB", "AGAINST THE BEST"]
    headers = [">RANK", "MODEL", *headers]
    render.print_table(headers, rows, empty="no evaluation of this data set: see `warmd eval`")
