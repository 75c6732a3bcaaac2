"""`warmd chat`: each answer is a job, and the prefix cache holds the chat so far."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ...jobs import spec_class
from ...jobs.data.templates import AS_IT_IS
from ...jobs.errors import SpecError, WarmdError
from ...jobs.files.chats import tool_calls_of
from ..shared.app import EXIT_INTERRUPTED, App, common_options, note
from .answer import Answer, show

if TYPE_CHECKING:
    from ...daemon.client.client import Client


@click.command()
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--system", help="System message at the start of the chat.")
@click.option("--tools", metavar="JSON", help="Tools that the chat template gets, or a file.")
@click.option(
    "--chat-template-kwargs", metavar="JSON", help="Variables of the chat template, or a file."
)
@click.option(
    "--reasoning-effort",
    metavar="WORD",
    help="Reasoning effort; none turns thinking off.  [default: as the chat template has it]",
)
@click.option("--max-tokens", metavar="N", help="Maximum number of tokens in an answer.")
@click.option("--temperature", metavar="X", help="Sampling temperature (0 = greedy).")
@click.option("--seed", metavar="N", help="Random seed for sampling.")
@common_options
@click.pass_obj
def chat(app: App, /, model: str | None, **given: Any) -> int:
    """Chat with MODEL.

    Default: the latest trained model that can chat, else the only loaded one. Every line is a
    message; where a model has no chat template but was trained with a prompt template, it is a
    question of its own, in that template. Ctrl-C ends an answer; /bye, Ctrl-D, or Ctrl-C at the
    prompt ends the chat. Thinking is dimmed, and each tool call is a line.
    """
    values = {
        **app.config().defaults.get("infer", {}),
        **{name: value for name, value in given.items() if value is not None},
        **({} if model is None else {"model": model}),
    }
    if values.get("actions", "none") == "none":
        values.setdefault("reply", "message")
    client = app.client()
    if "model" not in values:
        values["model"] = _chosen(app, client)
        other = app.command("chat MODEL")
        note(f"Model: {values['model']}. `{other}` chooses another one.")
    options = _checked(app, client, values)
    has_history = options["template"] == AS_IT_IS
    if not has_history:
        note("Each line is a question of its own: the answers do not know those before them.")
    if sys.stdin.isatty():
        note(f"Chat with {options['model']}. Ctrl-C ends an answer; /bye or Ctrl-D ends the chat.")
    return _talk(client, values, has_history=has_history)


def _checked(app: App, client: Client, values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an answer. Raises SpecError if the model cannot chat, naming others."""
    spec = _spec(values, [{"role": "user", "content": "?"}])
    try:
        document = client.jobs.check(spec)
    except SpecError as error:
        if error.field != "messages":
            raise
        able = _able(app, client.models.names())
        if able:
            cure = f"chat with {' or '.join(able)} instead"
        else:
            cure = f"load a model that has one: {app.command('load NAME=PATH')}"
        problem = str(error).removeprefix("messages: ")
        complete = app.command(f"run --model {spec.model} PROMPT")
        raise SpecError("messages", f"{problem}; {cure}, or complete text: {complete}") from error
    client.jobs.queues()  # raises Unavailable before anything is typed
    options: dict[str, Any] = document["spec"]
    return options


def _chosen(app: App, client: Client) -> str:
    """Return the latest trained model that can chat, else the only loaded one.

    Raises SpecError.
    """
    for job_id in client.jobs.trainings(_MOST_TRIED):
        with suppress(WarmdError):
            if (client.rundir(job_id).path / "model").is_dir() and _able(app, [job_id]):
                return job_id
    able = _able(app, client.models.names())
    if len(able) == 1:
        return able[0]
    if able:
        raise SpecError("model", f"must be given, one of {', '.join(able)}")
    load, run = app.command("load NAME=PATH"), app.command("run PROMPT")
    raise SpecError(
        "model",
        f"no trained or loaded model has a chat template: load one: {load}, or complete text: "
        f"{run}",
    )


def _able(app: App, models: Iterable[str]) -> list[str]:
    """Return those of the models that can chat."""
    client = app.client()
    client.on_note = None  # nothing is asked of them yet
    found = []
    for model in models:
        with suppress(WarmdError):
            client.jobs.check(_spec({"model": model}, [{"role": "user", "content": "?"}]))
            found.append(model)
    return found


def _spec(values: dict[str, Any], messages: list[dict[str, Any]]) -> Any:
    import orjson

    return spec_class("infer").parse({**values, "messages": orjson.dumps(messages).decode()})


def _talk(client: Client, values: dict[str, Any], *, has_history: bool) -> int:
    messages: list[dict[str, Any]] = []
    code = 0
    while (line := _read_message()) is not None and line.strip() not in _LEAVE:
        if not line.strip():
            continue
        if line.strip() == "/help":
            note("Every line is a message. Ctrl-C ends an answer; /bye or Ctrl-D ends the chat.")
            continue
        messages = messages if has_history else []
        messages.append({"role": "user", "content": line})
        answer, code = show(client, client.jobs.submit(_spec(values, messages)))
        if code not in (0, EXIT_INTERRUPTED):
            return code
        if answer.text or answer.calls:
            messages.append(message_of(answer))
        else:
            messages.pop()  # it was not answered
    return 0 if code == EXIT_INTERRUPTED else code


def message_of(answer: Answer) -> dict[str, Any]:
    """Return an answer as a message of the chat."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    return {**message, "tool_calls": tool_calls_of(answer.calls)} if answer.calls else message


_MOST_TRIED = 20  # trainings, the newest first
_LEAVE = ("/bye", "/exit", "/quit")


def _read_message() -> str | None:
    """Read the next message; None when there are no more."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    import readline  # noqa: F401  so that the line can be edited

    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        note("")
        return None
