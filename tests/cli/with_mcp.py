"""A session of the official MCP client with `warmd mcp`. Argument: the home. Prints JSON lines."""
# mypy: ignore-errors

from __future__ import annotations

import asyncio
import json
import sys

from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

DATA = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+3=", "answer": "5"}\n'
TRAINING = {"samples": 4, "num_generations": 2, "max_completion_length": 2, "learning_rate": 1e-4}
EVALUATION = {"samples": 4, "max_tokens": 2}


def say(**found):
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


async def experiment(session):
    async def call(tool, /, **arguments):
        async def note(*about):
            progress.append(about)

        progress = []
        done = await session.call_tool(tool, arguments, progress_callback=note)
        (part,) = done.content
        say(tool=tool, is_error=bool(done.is_error), text=part.text, progress=progress)
        return None if done.is_error else json.loads(part.text)

    await call("kinds")
    await call("kinds", kind="grpo")
    await call("models")
    file = await call("upload", filename='ru"le\n.jsonl', text=DATA)
    await call("files")
    base = await call("evaluate", model="tiny", options=EVALUATION, name="base")
    await call("wait", job=base["id"], timeout_s=60)
    given = {"kind": "grpo", "model": "tiny", "data": file["id"]}
    await call("submit", **given, options={**TRAINING, "samples": 2}, check_only=True)
    job = await call(
        "submit", **{**given, "data": "arithmetic"}, options=TRAINING, seed=3, name="sums/1"
    )
    await call("wait", job=job["id"], timeout_s=60)
    await call("metrics", job="sums/1", names=["reward"])
    await call("samples", job=job["id"], limit=1)
    second = await call("evaluate", model="sums/1", options=EVALUATION, against="base")
    await call("wait", job=second["id"], timeout_s=60)
    await call("diff", job="base", other="-")
    await call("resume", job=job["id"], changes={"steps": 6})
    await call("wait", job=job["id"], timeout_s=60)
    await call("jobs", kind="grpo", limit=1)
    # what is refused
    await call("cancel", job=job["id"])
    await call("submit", **given, options={"rewad": 1})
    await call("submit", **{**given, "data": "/etc/passwd"})
    await call("submit", **{**given, "model": "/etc"})
    await call("submit", **given, options={"reward": "evil:run"})
    await call("evaluate", model="tiny", data="/etc/passwd")
    await call("job", job="../../etc/passwd")
    await call("metrics", job=job["id"], names=["joy"])
    await call("kinds", kind="evil")


async def main():
    command = ["-m", "warmd.cli", "--home", sys.argv[1], "mcp"]
    server = StdioServerParameters(command=sys.executable, args=command)
    async with (
        stdio_client(server) as (read, write),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        tools = (await session.list_tools()).tools
        say(tools={tool.name: tool.annotations.read_only_hint for tool in tools})
        await experiment(session)


asyncio.run(main())
