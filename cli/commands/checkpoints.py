"""`warmd checkpoints list|verify|prune|export`: the checkpoints of a job on disk.

These commands read the run directory and need no daemon.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...jobs import spec_class
from ...jobs.context import step_of
from ...jobs.errors import CheckpointDamaged, NotFound, SpecError
from ...jobs.models.adapters import is_adapter
from ...jobs.spec import path_of
from ..shared.app import App, common_options, note
from ..shared.default_group import DefaultGroup
from ..shared.given import GivenPath
from ..shared.job_argument import complete_job, job_argument
from ..shared.target import ambiguous
from ..view import render
from .verify_resume import RESUME_STEPS, verify_resume
from .verify_trl import MOST_TRL_STEPS, TRL_STEPS, verify_trl

if TYPE_CHECKING:
    from ...daemon.runs.checkpoints import Checkpoints
    from ...daemon.runs.rundir import RunDir
    from ...daemon.runs.weights import Weights

_METRICS_SHOWN = 4


@click.group(
    cls=DefaultGroup,
    default="list",
    subcommand_metavar="list|verify|prune|export [OPTIONS]... JOB",
)
@common_options
def checkpoints() -> None:
    """List, verify, prune or export the checkpoints of JOB.

    `warmd checkpoints JOB` is `warmd checkpoints list JOB`.
    """


@checkpoints.command("list")
@job_argument
@common_options
@click.pass_obj
def list_(app: App, job: str | None) -> None:
    """List the checkpoints of JOB, the oldest first.

    Reads the manifests only; `verify` reads the files.
    """
    rundir = _rundir(app, job)
    found = _checkpoints(rundir)
    best = found.best_one()
    rows = [_row(found, path, is_best=path == best) for path in found.list()]
    if app.as_json:
        for row in rows:
            render.json_line(row)
        return
    render.print_table(
        ["", ">STEP", ">SIZE", "SAVED", ">AGE", "STATE", "METRICS"], [_cells(row) for row in rows]
    )
    if rows:
        note(f"{render.size(sum(row['bytes'] for row in rows))} in {found.folder}")


def _row(found: Checkpoints, path: Path, *, is_best: bool) -> dict[str, Any]:
    from ...daemon.runs.checkpoints import expected_bytes

    try:
        about, error = found.about(path), None
    except CheckpointDamaged as damage:
        about, error = {}, str(damage)
    return {
        "step": step_of(path),
        "path": str(path),
        "bytes": expected_bytes(path),
        "saved_at": about.get("time"),
        "metrics": about.get("metrics", {}),
        "best": is_best,
        "error": error,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    saved_at = row["saved_at"]
    metrics = [f"{n} {render.number(v)}" for n, v in list(row["metrics"].items())[:_METRICS_SHOWN]]
    return [
        "best" if row["best"] else "",
        str(row["step"]),
        render.size(row["bytes"]),
        render.clock(saved_at),
        render.duration(None if saved_at is None else max(time.time() - saved_at, 0)),
        render.NOTHING if row["error"] is None else _damaged(),
        "  ".join(metrics) if row["error"] is None else render.one_line(row["error"]),
    ]


def _damaged() -> str:
    return click.style("damaged", fg="red")


@checkpoints.command()
@job_argument
@click.option(
    "--step", type=int, metavar="N", help="Step of the checkpoint to verify.  [default: all]"
)
@click.option(
    "--trl", is_flag=True, help="Train the first steps with TRL's trainer too, and compare."
)
@click.option(
    "--resume", is_flag=True, help="Interrupt and resume the first steps, and compare all results."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1, max=10_000_000),
    metavar="N",
    help=f"Number of steps to train with --trl or --resume.  [default: {TRL_STEPS} or "
    f"{RESUME_STEPS}]",
)
@common_options
@click.pass_obj
def verify(
    app: App, job: str | None, step: int | None, trl: bool, resume: bool, steps: int | None
) -> int:
    """Read every file of the checkpoints of JOB, and compare it with its checksum.

    With --trl, train the first steps of an sft, dpo or grpo job instead, from its initial weights,
    once with TRL's stock trainer and once with warmd's training loop; show loss and gradient norm
    of both and the largest difference of a weight. Trains on the CPU, in a process of its own;
    checkpoints are not read.

    With --resume, run the first steps of JOB twice instead, in two temporary jobs at the front of
    the queue: one without interruption, one with a stop and a kill -9 at a random moment. All
    results are compared bit by bit.

    Exit code 1: a file is damaged, or the results differ (with --trl, by more than rounding).
    """
    if trl and resume:
        raise SpecError("resume", "must not go with trl")
    if step is not None and (trl or resume):
        name = "trl" if trl else "resume"
        raise SpecError("step", f"must not go with {name}, which reads no checkpoint")
    if trl:
        if steps is not None and steps > MOST_TRL_STEPS:
            raise SpecError("steps", f"must be at most {MOST_TRL_STEPS} with trl, got {steps}")
        return verify_trl(app, job, TRL_STEPS if steps is None else steps)
    if resume:
        return verify_resume(app, job, RESUME_STEPS if steps is None else steps)
    if steps is not None:
        raise SpecError("steps", "must go with trl or resume, got it alone")
    from ...daemon.runs.checkpoints import size_bytes, verify as verify_one

    rundir = _rundir(app, job)
    every = {step_of(path): path for path in _checkpoints(rundir).list()}
    if not every or (step is not None and step not in every):
        which = "" if step is None else f" of step {step}"
        raise NotFound(f"checkpoint: {rundir.path.name} has none{which}")
    chosen = every if step is None else {step: every[step]}
    errors: dict[int, str | None] = {}
    for number in chosen:
        app.client().models.fetch_weights(rundir.path.name, number)
    with _progress(sum(map(size_bytes, chosen.values()))) as on_bytes:
        for number, path in chosen.items():
            try:
                verify_one(path, on_bytes=on_bytes)
                errors[number] = None
            except CheckpointDamaged as damage:
                errors[number] = str(damage)
    for number, error in errors.items():
        if app.as_json:
            state = "whole" if error is None else "damaged"
            render.json_line({"step": number, "state": state, "error": error})
        elif error is None:
            click.echo(f"{chosen[number].name}  {click.style('whole', fg='green')}")
        else:
            click.echo(f"{chosen[number].name}  {_damaged()}  {render.one_line(error)}")
    return 1 if any(errors.values()) else 0


@checkpoints.command()
@job_argument
@click.option(
    "--keep",
    type=click.IntRange(min=1, max=10_000),
    metavar="N",
    help="Number of newest checkpoints to keep.  [default: the job's own --keep]",
)
@click.option("--yes", is_flag=True, help="Remove them; without --yes they are only listed.")
@common_options
@click.pass_obj
def prune(app: App, job: str | None, keep: int | None, yes: bool) -> None:
    """List the checkpoints of JOB that can be removed; with --yes, remove them.

    The newest ones and the best one are kept. Damaged ones do not count as kept, and the latest
    whole checkpoint is never removed. A running job is refused: it removes old checkpoints itself.
    Without JOB: the only job submitted on the command line that has checkpoints.
    """
    from ...daemon.runs import weights
    from ...daemon.runs.checkpoints import remove, size_bytes

    rundir = _prunable(app, job)
    found = _checkpoints(rundir, keep=keep)
    surplus: Sequence[Path] = ()
    client = app.client()
    client.models.fetch_weights(rundir.path.name)
    if paths := found.list():
        with _progress(size_bytes(paths[-1])) as on_bytes:
            latest = weights.checkpoint(rundir, on_bytes=on_bytes).folder
        surplus = found.surplus(newest=step_of(latest))
    sizes = {path: _freed_bytes(path) for path in surplus}
    with rundir.unused():
        pass  # a running job is refused, even if nothing would be removed
    for path in surplus if yes else ():
        with rundir.unused():  # one by one: it must not be kept for long
            remove(path)
    if yes and surplus and client.remote is not None:
        client.remote.note_removed_checkpoints(rundir.path.name)
    for path, size in sizes.items():
        if app.as_json:
            render.json_line({"step": step_of(path), "bytes": size, "removed": yes})
        else:
            click.echo(f"{path.name}  {render.size(size)}")
    if not surplus:
        note("nothing to prune")
    else:
        note(f"{'freed' if yes else 'would free'} {render.size(sum(sizes.values()))}")
    if surplus and not yes:
        option = "" if keep is None else f" --keep {keep}"
        note(f"Do it with: {app.command(f'checkpoints prune {rundir.path.name}{option} --yes')}")


def _freed_bytes(path: Path) -> int:
    """The bytes freed with a checkpoint, without files that the final model or a job shares."""
    stats = [file.stat() for file in path.rglob("*") if file.is_file()]
    return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


@checkpoints.command()
@click.argument("job", metavar="JOB", shell_complete=complete_job)
@click.argument("dest", type=GivenPath(path_type=Path))
@click.option(
    "--step",
    type=int,
    metavar="N",
    help="Step of the checkpoint to export.  [default: the final model, else the latest whole "
    "checkpoint]",
)
@click.option(
    "--with-optimizer",
    is_flag=True,
    help="Include the optimizer state and all else that a Trainer needs to resume.",
)
@click.option(
    "--merge",
    is_flag=True,
    help="Merge the LoRA adapter of JOB into its base model and export the result.",
)
@click.option(
    "--gguf",
    metavar="TYPE",
    help="Write a GGUF file for llama.cpp, with weights of this type (f32, f16, bf16, q8_0, q4_0), "
    "and a Modelfile for Ollama; needs pip install 'warmd[gguf]'.",
)
@common_options
@click.pass_obj
def export(
    app: App,
    job: str,
    dest: Path,
    step: int | None,
    with_optimizer: bool,
    merge: bool,
    gguf: str | None,
) -> None:
    """Copy a model of JOB to the new folder DEST, for `from_pretrained`, or with --gguf.

    Exports weights, configuration and tokenizer; if that fails, DEST is not created. For a LoRA job
    these are the adapter's, which needs its base model; --merge exports a complete model.
    """
    from ...daemon.runs import weights
    from ...daemon.runs.checkpoints import size_bytes

    if gguf is not None:
        _check_gguf(gguf, with_optimizer=with_optimizer)
    target = path_of("dest", str(dest), Path.cwd())
    rundir = _rundir(app, job)
    chosen, client = None, app.client()
    if step is None and not with_optimizer:
        client.models.fetch_weights(rundir.path.name, final=True)
        with contextlib.suppress(NotFound):
            chosen = weights.final_model(rundir)
    if chosen is None:
        client.models.fetch_weights(rundir.path.name, step)
        paths = _checkpoints(rundir).list()
        with _progress(size_bytes(paths[-1]) if paths else 0) as on_bytes:
            chosen = weights.checkpoint(rundir, step, on_bytes=on_bytes)
    if gguf is not None:
        written = _export_gguf(chosen, target, gguf, merge=merge)
    elif merge:
        written = _export_merged(chosen, target, with_optimizer=with_optimizer)
    else:
        written = weights.export(chosen, target, with_optimizer=with_optimizer)
    if app.as_json:
        render.json_line({"from": chosen.name, "path": str(target), "bytes": written})
    else:
        click.echo(dest)
        note(f"{render.size(written)} of {chosen.name}")


def _export_merged(chosen: Weights, target: Path, *, with_optimizer: bool) -> int:
    """Write the model of an adapter and its base; return its bytes. Raises SpecError."""
    from ...daemon.runs import weights

    if with_optimizer:
        raise SpecError("with_optimizer", "must not go with merge: its state is the adapter's")
    with weights.new_folder(target) as staging:
        return _merge(chosen, staging)


def _merge(chosen: Weights, folder: Path) -> int:
    """Write the model of an adapter and its base to `folder`; return its bytes."""
    from ...jobs.compute import cache

    if not is_adapter(chosen.folder):
        raise SpecError("merge", f"must be an adapter, got {chosen.name}, which is a whole model")
    cache.keep_library_caches()
    from ...daemon.client.checking import trained_prompt
    from ...daemon.fork.merging import write_merged  # imports torch: after the checks

    if (prompt := trained_prompt(chosen.folder)) is not None:
        prompt.write(folder)
    return write_merged(chosen.name, chosen.folder, folder)


def _check_gguf(kind: str, *, with_optimizer: bool) -> None:
    from ...jobs.models.gguf.writing import check_installed, check_type

    check_type(kind)
    if with_optimizer:
        raise SpecError("with_optimizer", "must not go with gguf, which has weights only")
    check_installed()


def _export_gguf(chosen: Weights, target: Path, kind: str, *, merge: bool) -> int:
    """Write a GGUF file and a Modelfile; print what differs there, and return the file's bytes."""
    from ...daemon.runs import weights
    from ...jobs.models.gguf.exporting import export as export_gguf

    with weights.new_folder(target) as staging:
        folder, merged = chosen.folder, staging / "merged"
        if merge:
            merged.mkdir()
            _merge(chosen, merged)
            folder = merged
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        with _progress(size) as on_bytes:
            written = export_gguf(folder, staging, kind, name=chosen.name, on_bytes=on_bytes)
        if merge:
            shutil.rmtree(merged)
    for line in written.notes:
        note(line)
    return written.size_bytes


def _rundir(app: App, job: str | None) -> RunDir:
    client = app.client()
    return client.rundir(client.find(job, is_training=True))


def _prunable(app: App, job: str | None) -> RunDir:
    """The named job, or else the only one that has checkpoints. Raises Conflict."""
    from ...daemon.runs.rundir import RunDir, job_ids
    from ...jobs.ids import by_time

    client = app.client()
    if job is not None and job != "-":
        return client.places.current(client.find(job))
    found = []
    for job_id in sorted(job_ids(client.home.runs), key=by_time, reverse=True):
        rundir = RunDir(client.home.runs / job_id)
        if rundir.checkpoints.is_dir() and rundir.origin() == "cli" and not rundir.is_held():
            found.append((rundir, len(_checkpoints(rundir).list())))
    found = [(rundir, number) for rundir, number in found if number]
    if not found:
        raise NotFound("job: no job of the command line has checkpoints and does not run")
    if len(found) > 1:
        raise ambiguous(
            app,
            "checkpoints prune",
            [(rundir.path.name, f"{number} checkpoints") for rundir, number in found],
        )
    return client.places.current(found[0][0].path.name)


def _checkpoints(rundir: RunDir, *, keep: int | None = None) -> Checkpoints:
    """The checkpoints of a job, kept as its spec says."""
    from ...daemon.runs.checkpoints import Checkpoints

    document = rundir.read_spec()
    spec = spec_class(document["kind"]).parse(document["spec"])
    return Checkpoints(
        rundir.checkpoints,
        keep=getattr(spec, "keep", 3) if keep is None else keep,
        best=getattr(spec, "best", None),
    )


@contextlib.contextmanager
def _progress(size_bytes: int) -> Iterator[Callable[[int], None] | None]:
    """Show progress on a terminal; yield a function that adds the bytes read, or None."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(
        length=size_bytes,
        label=f"reading {render.size(size_bytes)}",
        file=sys.stderr,
        update_min_steps=max(size_bytes // 200, 1),
    ) as bar:
        yield bar.update
        bar.update(size_bytes - bar.pos)  # bytes that did not need to be read
