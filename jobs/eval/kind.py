"""The eval kind: measure a model on a data set, and compare it with another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..context import Context, WarmModel
from ..data import left_out
from ..data.reader import Reading, report_skipped, report_splits
from ..errors import JobFailed, Stopped
from ..files.atomic import write_atomic
from ..models.chat_templates import chat_template_of, shown_prompt
from . import journal as journals
from .options import PERPLEXITY, EvalSpec
from .questions import Question, digest
from .report import REPORT, report
from .summary import Metric, Pairing, metrics_of, pair, unscored_fields

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.request import Request
    from .journal import Journal

_EVENT_S = 1.0  # between two events of progress


def run(spec: EvalSpec, ctx: Context) -> dict[str, Any]:
    """Evaluate every question that has no row yet; leave at the next token when `ctx.stop` is set.

    Returns metrics with intervals, the comparison with `against` (None without one), and the files
    with the rows and the report. Raises Stopped and JobFailed.
    """
    warm = ctx.models.take(spec.model)
    reading = spec.reading()
    questions = spec.questions(reading)
    if spec.task != PERPLEXITY:
        report_splits(ctx.emit, "dataset", *spec.data_sets)
    report_skipped(ctx.emit, reading)
    identities = [question.identity for question in questions]
    with journals.Journal(ctx.run_dir / journals.ROWS, identities, warm.weights) as journal:
        if journal.is_stale:
            ctx.emit("warning", message="the questions or the model have changed: begun again")
        begun, known = time.perf_counter(), len(journal.rows)
        precision = _evaluate(spec, ctx, warm, questions, reading, journal)
        seconds = time.perf_counter() - begun
    rows = journal.rows
    metrics = metrics_of(rows)
    if not metrics:
        completions = sum(len(row["completions"]) for row in rows)
        raise JobFailed(
            f"reward: must score at least one completion, got None for each of {completions}"
        )
    unscored = unscored_fields(next(iter(metrics.values())))
    if unscored and known and ctx.rules < 2:
        ctx.emit(
            "warning",
            message=f"completions that no reward scores are left out from question {known + 1} on; "
            "an earlier version counted them as 0",
        )
    pairing = None if spec.against is None else _pairing(ctx, spec.against, rows)
    if pairing is not None and ctx.rules < 2:
        ctx.emit(
            "warning",
            message="the comparison is by Student's paired t test; the version that submitted the "
            "job used McNemar's test or the bootstrap",
        )
    values: dict[str, Any] = {name: found.value for name, found in metrics.items()}
    intervals = {name: [found.low, found.high] for name, found in metrics.items()}
    n = next(iter(metrics.values())).n
    ctx.emit("eval", n=n, **unscored, **values, intervals=intervals)
    result = {
        "task": spec.task,
        "model": spec.model,
        "precision": precision,
        "questions": len(rows),
        "data": {"dataset": spec.source, "digest": digest(questions)},
        "metrics": {name: asdict(found) for name, found in metrics.items()},
        "against": spec.against,
        "comparison": None if pairing is None else pairing.to_json(),
        "rows": journals.ROWS,
        "report": REPORT,
        "timings": {"total_s": round(seconds, 3), "questions": len(rows) - known},
    }
    text = _report(spec, ctx, result, metrics, rows, pairing).encode()
    ctx.patiently(lambda: write_atomic(ctx.run_dir / REPORT, text), ctx.run_dir)
    return result


def _evaluate(
    spec: EvalSpec,
    ctx: Context,
    warm: WarmModel,
    questions: Sequence[Question],
    reading: Reading,
    journal: Journal,
) -> str:
    """Append the rows that are missing; return the precision that the model was served in."""
    from ..compute.levels import compute_summary
    from ..engine.cancellation import cancel_on_exit
    from ..engine.engines import engine_of, warn_of_model
    from .episodes import Evaluation

    engine = engine_of(warm, spec.precision or warm.precision)
    total, done = len(questions), len(journal.rows)
    prompt = spec.first_prompt_of(questions[0])
    ctx.emit(
        "begin",
        rows=total,
        done=done,
        model=spec.model,
        left_out=left_out.of_job(
            "dataset", *spec.data_sets, readings=[reading], is_text=spec.task == PERPLEXITY
        ),
        environment=spec.environment,
        agent=spec.agent,
        first_prompt=None
        if prompt is None
        else shown_prompt(prompt, chat_template_of(warm.tokenizer)),
        **compute_summary(ctx.device),
    )
    ctx.emit("progress", done=done, total=total)
    due = time.monotonic() + _EVENT_S

    def append(found: Mapping[str, Any]) -> None:
        """Append the row of the next question."""
        nonlocal due
        number = len(journal.rows)
        if number == done:
            warn_of_model(ctx, engine, warm)
        identity = questions[number].identity
        row = {"row": number + 1, "question": identity, "weights": warm.weights, **found}
        ctx.patiently(partial(journal.append, row), ctx.run_dir)
        ctx.patiently(journal.sync_if_due, ctx.run_dir)
        if time.monotonic() >= due or number + 1 == total:
            due = time.monotonic() + _EVENT_S
            ctx.emit("progress", done=number + 1, total=total)

    with cancel_on_exit(ctx) as is_canceled:
        try:
            if spec.played is not None:
                evaluation = Evaluation(spec, ctx, warm, engine, questions)
                evaluation.play(done, is_canceled, append)
            else:
                _answer(spec, ctx, warm, engine, questions, done, is_canceled, append)
        except Stopped:
            journal.sync()
            raise Stopped(len(journal.rows)) from None
    ctx.patiently(journal.sync, ctx.run_dir)
    return engine.precision if done < total else spec.precision or warm.precision


def _answer(
    spec: EvalSpec,
    ctx: Context,
    warm: WarmModel,
    engine: Engine,
    questions: Sequence[Question],
    done: int,
    is_canceled: Callable[[], bool],
    append: Callable[[Mapping[str, Any]], None],
) -> None:
    """Let the model answer the questions from number `done` on; `append` gets their rows."""
    from .answers import answered
    from .tasks import task_of

    with task_of(spec, warm, questions, ctx.code_folders) as task:

        def work() -> Iterator[tuple[Any, list[Request]]]:
            for number in range(done, len(questions)):
                yield task.requests(number, questions[number], is_canceled)

        for subject, answers in answered(engine, work()):
            append(task.row(subject, answers))


def _pairing(ctx: Context, against: str, rows: Sequence[dict[str, Any]]) -> Pairing:
    """Compare with the rows of another job of this home. Raises JobFailed."""
    path = ctx.run_dir.parent / against / journals.ROWS
    try:
        found = pair(journals.read(path), rows)
    except OSError as error:
        raise JobFailed(f"against: {against} has no rows to compare with: {error}") from error
    except OverflowError as error:  # an earlier version may have accepted such rewards
        raise JobFailed(f"against: {against} cannot be compared with: {error}") from error
    if found is None:
        raise JobFailed(
            f"against: {against} has no question of this evaluation that both have a score for"
        )
    return found


def _report(
    spec: EvalSpec,
    ctx: Context,
    result: dict[str, Any],
    metrics: dict[str, Metric],
    rows: Sequence[dict[str, Any]],
    pairing: Pairing | None,
) -> str:
    about = {
        "job": ctx.job_id,
        "task": spec.task,
        "data": f"{Path(spec.source).name}, {len(rows)} questions, "
        f"digest {result['data']['digest'][:12]}",
        "precision": str(result["precision"]),
        "weights": str(rows[0]["weights"]),
        "sampling": f"temperature {spec.temperature:g}, {spec.repeats} per question",
    }
    if spec.variant is not None:
        about["examples"] = str(spec.num_examples)
    return report(
        title=f"{spec.task}: {spec.model}",
        about=about,
        metrics=metrics,
        rows=rows,
        against=spec.against,
        pairing=pairing,
    )
