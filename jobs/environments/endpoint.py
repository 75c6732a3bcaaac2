"""The unix socket on which a job gets the requests of its agents, which the gateway passes on.

A connection has one request, a line of JSON, and one reply, which the gateway acknowledges: a reply
that has not been acknowledged when the connection ends is lost, and the agent will repeat its
request. A thread serves the connections; the job takes the requests when it has time.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .agent_keys import Keys, remove_dead

MOST_BYTES = 128 << 20  # of a request; the gateway takes 64 MiB
ACKNOWLEDGED = b"ok\n"


@dataclass(eq=False)
class AgentRequest:
    """A request: `key` of the agent, `options` of an infer job.

    `fingerprint`: the same for equal requests. `is_retry`: whether the client has sent it before.
    `is_lost`: whether the connection has ended without an acknowledged reply.
    """

    key: str
    fingerprint: str
    is_retry: bool
    options: dict[str, Any]
    _reply: asyncio.Future[dict[str, Any]] = field(repr=False)
    is_lost: bool = False

    def answer(self, result: dict[str, Any]) -> None:
        """Send the result of the request."""
        self._send({"result": result})

    def refuse(self, status: int, message: str, **more: str | None) -> None:
        """Send an error, as `gateway.http.errors.ApiError` has it."""
        self._send({"error": {"status": status, "message": message, **more}})

    def _send(self, reply: dict[str, Any]) -> None:
        def send() -> None:
            if not self._reply.done():  # else the connection has ended
                self._reply.set_result(reply)

        with suppress(RuntimeError):  # the thread has ended
            self._reply.get_loop().call_soon_threadsafe(send)


class Endpoint:
    """Listens for the agents of a rank of a job while it is open. A context manager.

    `new_key` returns the key of another episode. `fileno` is readable when `take` has something to
    return.
    """

    def __init__(self, folder: Path, job_id: str, rank: int) -> None:
        """`folder`: of the daemon's sockets."""
        self._folder = folder
        self._keys = Keys(folder, job_id, rank)
        self._path = self._keys.socket
        self._requests: queue.SimpleQueue[AgentRequest] = queue.SimpleQueue()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)

    def __enter__(self) -> Endpoint:
        """Raises OSError."""
        remove_dead(self._folder)
        self._path.unlink(missing_ok=True)  # of an execution that was killed
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._path))
            os.chmod(self._path, 0o600)
            listener.listen(128)
            self._keys.publish()
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._inode = self._path.stat().st_ino
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._keys.revoke()
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()
        self._loop.close()
        self._listener.close()
        self._wake.close()
        self._waker.close()
        with suppress(OSError):  # a newer execution may listen there
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def new_key(self) -> str:
        return self._keys.new()

    def fileno(self) -> int:
        return self._wake.fileno()

    def take(self) -> list[AgentRequest]:
        """Return the requests that have arrived, in their order."""
        with suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._requests.get_nowait())
        return found

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())

    async def _listen(self) -> None:
        server = await asyncio.start_unix_server(
            self._connected, sock=self._listener, limit=MOST_BYTES
        )
        await self._ending.wait()
        own = asyncio.current_task()
        # Those that are not ours are asyncio's, for connections that have just been accepted; they
        # fail and leave their sockets open if the server is closed first.
        while others := [task for task in asyncio.all_tasks() if task is not own]:
            for task in self._connections:
                task.cancel()
            await asyncio.wait(others)
        server.close()
        await asyncio.sleep(0)  # closed sockets end in the next iteration of the loop

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def over(task: asyncio.Task[None]) -> None:
            self._connections.discard(task)
            writer.close()

        task = self._loop.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(over)  # also of a task that is canceled before it has begun

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # It has ended, or is no gateway.
        with suppress(OSError, ValueError, TypeError):
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = json.loads(await reader.readline())
        request = AgentRequest(**asked, _reply=self._loop.create_future())
        self._requests.put(request)
        with suppress(BlockingIOError):  # it is awake
            self._waker.send(b"\0")
        ended = asyncio.ensure_future(reader.readline())
        try:
            either: set[asyncio.Future[Any]] = {request._reply, ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not request._reply.done():
                return
            # Half of a surrogate pair, which a tokenizer can make, is no text for clients.
            reply = json.dumps(request._reply.result(), ensure_ascii=False)
            writer.write(reply.encode(errors="replace") + b"\n")
            await writer.drain()
            await ended
        finally:
            is_acknowledged = (
                ended.done()
                and not ended.cancelled()
                and ended.exception() is None
                and ended.result() == ACKNOWLEDGED
            )
            request.is_lost = not is_acknowledged
            request._reply.cancel()
            ended.cancel()
