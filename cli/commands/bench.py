"""`warmd bench`: the speed of warmd on this machine, and projections of long jobs.

Comparisons run synthetic work in separate processes (`works.py`). A projection runs a real job on
the daemon: `mlm` shortens the job of the given options, queues it, waits for it and removes it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...configs.gpus import read_device
from ...jobs import spec_class
from ...jobs.bench import works
from ...jobs.context import step_of
from ...jobs.errors import Conflict, JobFailed, SpecError
from ...jobs.mlm.options import MlmSpec
from ..shared.app import App, common_options, note
from ..shared.job_argument import complete_job
from ..shared.option_values import gathered
from ..shared.spec_options import file_options, spec_option
from ..view import render
from ..view.projection import StepTimes, headers, projection, step_times
from .watch import wait
from .works import Measure, show, work_options

if TYPE_CHECKING:
    from ...daemon.client.client import Client
    from ...daemon.runs.weights import Weights
    from ...jobs.spec import Spec

WARM_UP = 3  # steps: the first touches all memory of the optimizer for the first time


@click.group()
@common_options
def bench() -> None:
    """Compare KIND with the stock library, or project a long job.

    Both sides run the same workloads alternately; the table shows their medians. FLOOR is the limit
    of the hardware, computed from its measured float32 GEMM throughput and memory bandwidth; SHARE
    is how close warmd comes to that limit.
    """


PAIRS = 2  # of processes of GRPO, SFT and DPO: each takes a minute
MANY_PAIRS = 5  # within one process


@bench.command("grpo", params=work_options(works.GRPO, pairs=PAIRS))
@common_options
def _grpo(work: tuple[str, ...], pairs: int, threads: int | None, device: str) -> None:
    """Compare optimizer steps with TRL's GRPOTrainer in float32, on random weights.

    Each side runs in fresh processes. The model of WORK is made in the folder for temporary files:
    2 GB for 0.5b, whose steps take up to 13 GB of memory.
    """
    from ...jobs.bench import rows

    _show_works(rows.grpo, work or works.usual(works.GRPO), pairs, threads, device)


@bench.command("sft", params=work_options(works.SFT, pairs=PAIRS))
@common_options
def _sft(work: tuple[str, ...], pairs: int, threads: int | None, device: str) -> None:
    """Compare optimizer steps with TRL's SFTTrainer in float32, on random weights.

    Each side runs in fresh processes. The model of WORK is made in the folder for temporary files:
    2 GB for 0.5b.
    """
    from ...jobs.bench import rows

    _show_works(rows.sft, work or works.usual(works.SFT), pairs, threads, device)


@bench.command("dpo", params=work_options(works.DPO, pairs=PAIRS))
@common_options
def _dpo(work: tuple[str, ...], pairs: int, threads: int | None, device: str) -> None:
    """Compare optimizer steps with TRL's DPOTrainer in float32, on random weights.

    Each side runs in fresh processes. The model of WORK is made in the folder for temporary files:
    2 GB for 0.5b.
    """
    from ...jobs.bench import rows

    _show_works(rows.dpo, work or works.usual(works.DPO), pairs, threads, device)


@bench.command("infer", params=work_options(works.INFER, pairs=MANY_PAIRS))
@common_options
def _infer(work: tuple[str, ...], pairs: int, threads: int | None, device: str) -> None:
    """Compare single-sequence decode in each precision with transformers' generate."""
    from ...jobs.bench import rows

    _show_works(rows.infer, work or works.usual(works.INFER), pairs, threads, device)


def _show_works(
    measure: Measure, names: Sequence[str], pairs: int, threads: int | None, device: str
) -> None:
    from ...jobs.bench.rows import Effort, check_device

    effort = Effort(pairs=pairs, threads=threads, device=read_device("device", device))
    app = click.get_current_context().ensure_object(App)
    with _interrupted_by(signal.SIGTERM, signal.SIGHUP):
        check_device(effort.device)
        show(app, measure, names, effort)


def _mlm_command() -> click.Command:
    options = spec_class("mlm").options()

    def callback(
        config_file: Path | None,
        settings: tuple[str, ...],
        job: str | None,
        measured: int,
        work: tuple[str, ...],
        pairs: int,
        threads: int | None,
        device: str,
        **given: Any,
    ) -> None:
        is_of_job = (
            config_file or settings or any(value not in (None, ()) for value in given.values())
        )
        if job is None and not is_of_job:
            from ...jobs.bench import rows

            _show_works(rows.mlm, work or works.usual(works.MLM), pairs, threads, device)
            return
        if work:
            raise SpecError("work", "must be given without options of a job, got both")
        app = click.get_current_context().ensure_object(App)
        client = app.client()
        if job is None:
            spec = MlmSpec.parse(gathered(app, "mlm", given, config_file, settings))
            init = None
        else:
            if is_of_job:
                raise SpecError("job", "must be given alone: its own options are measured")
            job = client.find(job)
            spec, init = _spec_of(client, job)
        short = replace(
            spec,
            steps=WARM_UP + measured,
            time_limit=None,
            # One evaluation, after the last step, where the job has any. No other checkpoint.
            eval_every=min(spec.eval_every, 1) * (WARM_UP + measured),
            eval_first=False,
            save_every=str(WARM_UP + measured),
            keep=1,
            keep_best=None,
            report_to=(),
        )
        with _finished(app, client, short, init) as events:
            times = step_times(events, warm_up=WARM_UP, eval_every=spec.eval_every)
            begin = next(event for event in events if event["type"] == "begin")
        _show_projection(app, spec, times, begin, None if job is None else _checkpoint(client, job))

    return click.command(
        "mlm",
        params=[
            click.Option(
                ["--job"],
                metavar="JOB",
                shell_complete=complete_job,
                help="Job whose options are measured; the projection also starts from its latest "
                "checkpoint.",
            ),
            click.Option(
                ["--measured"],
                type=click.IntRange(min=2, max=10_000_000),
                default=10,
                show_default=True,
                metavar="N",
                help=f"Number of steps to measure, after {WARM_UP} warmup steps.",
            ),
            *work_options(works.MLM, pairs=MANY_PAIRS),
            *map(spec_option, options.values()),
            *file_options(),
        ],
        help="Compare micro-steps with torch's kernels, or project how long an MLM job takes.\n\n"
        "With --job or options of `submit mlm`, a short job is run and its speed extrapolated.",
    )(common_options(callback))


bench.add_command(_mlm_command())


def _spec_of(client: Client, job_id: str) -> tuple[MlmSpec, Weights | None]:
    """The spec of an MLM job, and its initial weights if they are another job's."""
    document = client.rundir(job_id).read_spec()
    if document["kind"] != "mlm":
        raise SpecError("job", f"must be an mlm job, got {job_id}")
    origin = document.get("init_from")
    weights = None if origin is None else client.models.weights(origin)
    return MlmSpec.parse(document["spec"]), weights


def _checkpoint(client: Client, job_id: str) -> int:
    """The step of a job's newest checkpoint; 0 when it has none."""
    from ...daemon.runs.checkpoints import Checkpoints

    found = Checkpoints(client.rundir(job_id).checkpoints).list()
    return step_of(found[-1]) if found else 0


@contextmanager
def _finished(
    app: App, client: Client, spec: Spec, init: Weights | None
) -> Iterator[list[dict[str, Any]]]:
    """Run a job before all waiting ones, yield its events, and remove it.

    A failed job stays, so that its log can be read. An interrupted one is killed and removed.
    """
    from ...daemon.lifecycle.queueing import Queueing
    from ...daemon.runs import events

    job_id = client.jobs.submit(spec, Queueing(front=True), init=init, origin="check")
    try:
        with _interrupted_by(signal.SIGTERM, signal.SIGHUP):
            status = wait(client, job_id)
    except KeyboardInterrupt:
        client.jobs.kill(job_id)
        wait(client, job_id)
        client.jobs.remove(job_id)
        raise
    if status == "failed":
        error = client.jobs.get(job_id)["error"]
        raise JobFailed(f"{error}; its log: {app.command(f'logs {job_id}')}")
    if status != "finished":
        client.jobs.remove(job_id)
        raise Conflict(f"the measurement was {status}")
    yield list(events.read(client.rundir(job_id).events))
    client.jobs.remove(job_id)


@contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """Make these signals act like Ctrl-C: a closed terminal must not leave a job behind."""
    before = [signal.signal(number, signal.default_int_handler) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _show_projection(
    app: App, spec: MlmSpec, times: StepTimes, begin: Mapping[str, Any], checkpoint: int | None
) -> None:
    now = time.time()
    rows = projection(times, now=now, checkpoint=checkpoint, steps_total=spec.steps_total)
    if app.as_json:
        render.json_line(
            {
                "kind": spec.kind,
                **asdict(times),
                "warm_up": WARM_UP,
                "micro_step_s": times.step_s / spec.gradient_accumulation,
                "parameters": begin["parameters"],
                "device": begin["device"],
                "threads": begin["threads"],
                "checkpoint": checkpoint,
                "projection": rows,
            }
        )
        return
    note(_summary(spec, times, begin))
    render.print_table(
        headers(checkpoint),
        [
            [
                f"{row['steps']:,}",
                render.duration(3600 * row["hours"]),
                render.clock(row["ends_at"], now=now),
                *(_resumed(row, now) if checkpoint is not None else ()),
            ]
            for row in rows
        ],
    )


def _resumed(row: Mapping[str, Any], now: float) -> list[str]:
    if row["hours_left"] is None:
        return [render.NOTHING] * 2
    return [
        render.duration(3600 * row["hours_left"]),
        render.clock(row["resumed_ends_at"], now=now),
    ]


def _summary(spec: MlmSpec, times: StepTimes, begin: Mapping[str, Any]) -> str:
    micro_steps = spec.gradient_accumulation
    text = f"{render.duration(times.step_s)} a step, the median of {times.num_steps}"
    if micro_steps > 1:
        text += f" ({micro_steps} micro-steps of {render.duration(times.step_s / micro_steps)})"
    text += (
        f"; {begin['parameters'] / 1e6:.3g} M parameters, {spec.batch_size} x {spec.seq_len} "
        f"tokens, {begin['device']}, {begin['threads']} threads"
    )
    if times.eval_s is not None:
        text += f"; an evaluation of {render.duration(times.eval_s)} every {times.eval_every} steps"
    return text
