"""`warmd chat`: a conversation with a model. Every turn is a job; the daemon keeps what it read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from ...jobs import spec_class
from ..shared.app import EXIT_INTERRUPTED, App, common_options, note
from .answer import show

if TYPE_CHECKING:
    from ...daemon.client.client import Client


@click.command()
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--system", help="System message that opens the chat.")
@click.option("--max-tokens", metavar="N", help="Most tokens of an answer.")
@click.option("--temperature", metavar="X", help="Of the sampling; 0: the likeliest token.")
@click.option("--seed", metavar="N", help="Of the sampling.")
@common_options
@click.pass_obj
def chat(app: App, /, model: str | None, **given: Any) -> int:
    """Talk with MODEL.

    Every line is a message. Ctrl-C ends an answer, Ctrl-D the chat.
    """
    values = {
        **app.config().defaults.get("infer", {}),
        **{name: value for name, value in given.items() if value is not None},
        **({} if model is None else {"model": model}),
    }
    return _talk(app.client(), values)


def _talk(client: Client, values: dict[str, Any]) -> int:
    import orjson

    messages: list[dict[str, str]] = []
    code = 0
    while (line := _ask()) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        spec = spec_class("infer").parse({**values, "messages": orjson.dumps(messages).decode()})
        text, code = show(client, client.submit(spec))
        if code not in (0, EXIT_INTERRUPTED):
            return code
        if text:
            messages.append({"role": "assistant", "content": text})
        else:
            messages.pop()  # it was not answered
    return 0 if code == EXIT_INTERRUPTED else code


def _ask() -> str | None:
    """Read the next message; None when there are no more."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    import readline  # noqa: F401  so that the line can be edited

    while True:
        try:
            return input("> ")
        except EOFError:
            note("")
            return None
        except KeyboardInterrupt:
            note("")  # as in a shell: a new line to begin with
