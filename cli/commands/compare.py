"""`warmd compare`: answers of a model before and after a training, or of two models."""

from __future__ import annotations

import secrets
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...configs.queues import TRAIN
from ...jobs import spec_class
from ...jobs.errors import Conflict, SpecError, WarmdError
from ...jobs.models.adapters import base_of, is_adapter
from ...jobs.spec import path_of
from ..shared.app import EXIT_INTERRUPTED, App, common_options, note
from ..shared.job_argument import complete_job
from ..shared.names import model_names
from ..shared.spec_options import spec_option
from ..view import render
from .watch import EXIT_CODES

if TYPE_CHECKING:
    from ...configs.config import ModelConfig
    from ...daemon.client.client import Client
    from ...jobs.spec import OptionInfo, Spec

_PROMPT = ("template", "chat_template", "system")  # options that say what a prompt is put into
_OPTIONS = (
    *_PROMPT, "max_tokens", "temperature", "top_p", "top_k", "stop", "seed",
    "precision",
)  # fmt: skip
_TEMPERATURE = 0  # greedy: differences come from the weights only
_SEED_BITS = 62
_GAP = 3  # columns of the terminal between the two texts


def _compare(job: str, prompts: tuple[str, ...], **given: Any) -> int:
    """Compare the answers to PROMPTs before and after a training, or of two models.

    JOB `-` is the latest training, and a sweep its best job. JOB@STEP compares with that
    checkpoint; instead of JOB an adapter's folder may be given. With MODEL, JOB is the first model
    and MODEL the second one: each is a loaded model, a trained job or JOB@STEP. Both models answer
    at the same time, with the same seed and precision; a loaded model is not loaded again. Exits
    with 1 when an answer failed.
    """
    app = click.get_current_context().ensure_object(App)
    values: dict[str, Any] = {
        "temperature": _TEMPERATURE,
        **app.config().defaults.get("infer", {}),
        **{name: value for name, value in given.items() if value is not None and value != ()},
    }
    values.setdefault("seed", secrets.randbits(_SEED_BITS))
    client = app.client()
    words = prompts
    models, prompts = _models(app, client, job, words)
    values.setdefault("precision", models[0].precision)
    if prompts == words:  # before and after a training: both are asked as in it
        spec = _spec({**values, "prompt": prompts[0], "model": models[1].name})
        checked = client.jobs.check(spec, model=models[1])["spec"]
        values |= {name: checked[name] for name in _PROMPT}
    jobs: list[str] = []
    try:
        specs = [
            (_spec({**values, "prompt": prompt, "model": model.name}), model)
            for prompt in prompts
            for model in models
        ]
        for spec, model in specs:  # nothing is queued if one of them is refused
            client.jobs.check(spec, model=model)
        for spec, model in specs:
            jobs.append(client.jobs.submit(spec, model=model))
        answers = [_answer(client, job_id) for job_id in jobs]
    except KeyboardInterrupt:
        for job_id in jobs:
            with suppress(WarmdError):  # it has ended meanwhile
                client.jobs.cancel(job_id)
        return EXIT_INTERRUPTED
    names = [model.name for model in models]
    pairs = list(zip(prompts, answers[::2], answers[1::2], strict=True))
    for prompt, base, trained in pairs:
        if app.as_json:
            render.json_line(
                {
                    "prompt": prompt,
                    "seed": int(values["seed"]),
                    "base": {"model": names[0], **base},
                    "trained": {"model": names[1], **trained},
                }
            )
    if not app.as_json:
        called = model_names(client, names)
        _print([called[name] for name in names], pairs)
    return max(EXIT_CODES.get(answer["status"], 0) for answer in answers)


def _spec(values: Mapping[str, Any]) -> Spec:
    return spec_class("infer").parse(values)


def _models(
    app: App, client: Client, job: str, prompts: tuple[str, ...]
) -> tuple[tuple[ModelConfig, ModelConfig], tuple[str, ...]]:
    """The two models, and the prompts without the name of the second model.

    The first word after JOB names a model only if a prompt follows it. Raises SpecError for a
    loaded model that nothing is compared with.
    """
    if len(prompts) > 1 and (second := _named(client, prompts[0])) is not None:
        first = _named(client, job)
        if first is None:
            raise SpecError("job", f"must be a loaded model or a trained job, got {job!r}")
        return (first, second), prompts[1:]
    if job in client.models.names():
        other = app.command(f"compare {job} MODEL PROMPT")
        raise SpecError(
            "job", f"{job!r} is a loaded model; to compare it with another one: {other}"
        )
    return _of_adapter(app, job) or _before_and_after(client, job), prompts


def _named(client: Client, text: str) -> ModelConfig | None:
    """The loaded model of this name, or the one that a job has trained; None if there is none."""
    from ...daemon.client.trained import trained_by
    from ...daemon.host.warm_set import known_models

    known = {model.name: model for model in client.config.models} | known_models(client.home)
    return known.get(text) or trained_by(client.config, text)


def _of_adapter(app: App, text: str) -> tuple[ModelConfig, ModelConfig] | None:
    """The base model, by its warm name if it has one, and the model with the adapter.

    None if it is not an adapter's folder. Raises SpecError for an adapter that cannot be loaded.
    """
    from ...configs.config import ModelConfig
    from ...daemon.host.home import Home
    from ...daemon.host.warm_set import known_models

    folder = path_of("job", text, Path.cwd())
    if not is_adapter(folder):
        return None
    folder = folder.resolve()
    try:
        base = base_of(folder)
    except (OSError, ValueError) as error:
        raise SpecError("job", f"must be a job or an adapter's folder: {error}") from error
    for model in known_models(Home(app.config().home)).values():
        if Path(model.path) == Path(base):
            return model, ModelConfig(name=folder.name, path=str(folder), dtype=model.dtype)
    is_folder = Path(base).is_absolute()
    named = ModelConfig(name=Path(base).name if is_folder else base.replace("/", "--"), path=base)
    return named, ModelConfig(name=folder.name, path=str(folder))


def _before_and_after(client: Client, text: str) -> tuple[ModelConfig, ModelConfig]:
    """The model that a training job started from, and the weights of `JOB` or `JOB@STEP`.

    `-` is the latest training. Raises Conflict for a job that is not a training.
    """
    from ...configs.config import ModelConfig

    job, at, step = text.partition("@")
    job_id = client.models.training(job)
    document = client.rundir(job_id).read_spec()
    if "model" not in document or spec_class(document["kind"]).queue != TRAIN:
        raise Conflict(f"job: {job_id} started from no model: there is nothing to compare with")
    weights = client.models.weights(f"{job_id}{at}{step}")
    trained = ModelConfig(name=weights.name, path=str(weights.folder))
    return ModelConfig(**document["model"]), trained


def _answer(client: Client, job_id: str) -> dict[str, Any]:
    for _ in client.jobs.follow(job_id):
        pass
    job = client.jobs.get(job_id)
    found = {"job": job_id, "status": job["status"], "error": job["error"]}
    if job["result"] is None:
        note(f"{job_id}: {job['status']}: {render.one_line(job['error'] or 'no reason given')}")
        return {**found, "text": None, "finish_reason": None, "usage": None, "timings": None}
    (choice,) = job["result"]["choices"]
    kept = {name: job["result"][name] for name in ("usage", "timings")}
    return {**found, "text": choice["text"], "finish_reason": choice["finish_reason"], **kept}


def _print(
    names: Sequence[str], pairs: Sequence[tuple[str, dict[str, Any], dict[str, Any]]]
) -> None:
    """Print the answers side by side, under each prompt."""
    width = (shutil.get_terminal_size().columns - _GAP) // 2
    for prompt, *answers in pairs:
        click.secho(f"> {render.one_line(prompt)}", bold=True)
        columns = [
            [name, "-" * min(len(name), width), *_lines(answer["text"], width)]
            for name, answer in zip(names, answers, strict=True)
        ]
        for row in range(max(map(len, columns))):
            left, right = (column[row] if row < len(column) else "" for column in columns)
            click.echo(f"{left:<{width + _GAP}}{right}".rstrip())
        click.echo()


def _lines(text: str | None, width: int) -> list[str]:
    """A text in lines of at most `width`, safe on a terminal."""
    if text is None:
        return ["(no answer)"]
    shown = [render.one_line(line) for line in text.splitlines()]
    return [part for line in shown for part in textwrap.wrap(line, width) or [""]]


def _options() -> Iterator[OptionInfo]:
    for name in _OPTIONS:
        info = spec_class("infer").options()[name]
        yield replace(info, default=_TEMPERATURE) if name == "temperature" else info


compare = common_options(
    click.command(
        "compare",
        params=[
            click.Argument(["job"], metavar="JOB", shell_complete=complete_job),
            click.Argument(["prompts"], metavar="[MODEL] PROMPT...", nargs=-1, required=True),
            *map(spec_option, _options()),
        ],
    )(_compare)
)
