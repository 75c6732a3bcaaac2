"""The overview of the daemon: a snapshot, and its changes for all watchers.

One task reads Redis and the daemon for all watchers, and only while there are some, and those that
begin at the same time share a snapshot: ten open pages cost as much as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import AsyncGenerator
from typing import Any

import psutil
import redis

from ....jobs.errors import WarmdError
from ...client import control
from ...client.client import Client
from ...lifecycle.statuses import PENDING, WAITING
from ...lifecycle.view import JobFilter
from ..http.bodies import InThread
from . import live
from .inbox import Inbox, Pace
from .shared import Shared

log = logging.getLogger(__name__)

Part = dict[str, Any]  # one or more of the snapshot's keys, and their new values

_JOBS_S = 1.0  # between two reads of the jobs
_STATUS_ROUNDS = 5  # rounds of reading jobs for one request to the daemon
_MAX_WAITING = 200  # jobs that are watched while they wait: the newest
_NEWEST = 20  # jobs that are watched although they may have ended between two reads
_NEWEST_GROUPS = 20  # sweeps, and curricula, that are watched although they have ended
_UNREAD = 100  # changes per watcher; one that is further behind is sent a whole snapshot


class Overview:
    """The state of the daemon and its jobs, for many watchers. For one event loop."""

    def __init__(
        self, client: Client, in_thread: InThread, in_control_thread: InThread, pace: Pace
    ) -> None:
        self._client = client
        self._in_thread = in_thread
        self._in_control_thread = in_control_thread
        self._pace = pace
        self._watchers: set[Inbox[bytes]] = set()
        self._jobs: dict[str, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] | None = None  # None: not sent yet
        self._task: asyncio.Task[None] | None = None
        self._snapshot = Shared(self._read_snapshot)

    async def snapshot(self) -> Part:
        """Return the daemon's status, the machine, and the jobs that run or wait."""
        return await self._snapshot.get()

    async def _read_snapshot(self) -> Part:
        status, jobs = await asyncio.gather(self._read_status(), self._in_thread(self._read_jobs))
        pending = [job for job in jobs.values() if job["status"] in PENDING]
        page = self._client.config.http_page
        groups = await self._in_thread(self._read_groups)
        return {**status, "jobs": pending, "gone": [], "groups": groups, "page": page}

    async def watch(self, **fields: Any) -> AsyncGenerator[bytes, None]:
        """Yield the event `snapshot`, with these fields, too, then events `change`.

        A change with `jobs` has only the changed jobs.
        """
        inbox: Inbox[bytes] = Inbox(_UNREAD, self._pace)
        self._watchers.add(inbox)  # before the snapshot: no change is missed
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield live.event({**await self.snapshot(), **fields}, name="snapshot")
            while (changes := await inbox.take()) is not None:
                yield b"".join(changes) or live.SILENT
        finally:
            self._watchers.discard(inbox)
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = None

    def stop(self) -> None:
        """End every `watch`."""
        for inbox in self._watchers:
            inbox.close()

    async def _run(self) -> None:
        """Send changes to the watchers, until canceled."""
        # The first round sends all, which may have changed since a snapshot.
        self._jobs, self._groups = {}, None
        try:
            for number in itertools.count(1):
                await asyncio.sleep(_JOBS_S)
                part: Part = {}
                with contextlib.suppress(redis.RedisError, WarmdError):  # Redis is restarting
                    part = await self._in_thread(self._changed)
                if number % _STATUS_ROUNDS == 0:
                    part |= await self._read_status()
                if part:
                    self._send(live.event(part, name="change"))
        except Exception:  # a bug: it is logged, and must not end the updates for good
            log.exception("http: the overview cannot be read")
            self._task = None
            self.stop()  # the pages connect again

    def _send(self, change: bytes) -> None:
        for inbox in self._watchers:
            if inbox.is_full:  # its client does not read: it connects again, to a new snapshot
                inbox.close()
            else:
                inbox.put(change)

    def _changed(self) -> Part:
        # The groups first: an error must not lose changes of jobs that count as sent.
        groups = self._read_groups()
        part = self._changed_jobs()
        if groups != self._groups:
            part["groups"] = self._groups = groups
        return part

    def _read_groups(self) -> list[dict[str, Any]]:
        return self._client.groups.overview(_NEWEST_GROUPS)

    def _changed_jobs(self) -> Part:
        before, now = self._jobs, self._read_jobs()
        changed = [job for job_id, job in now.items() if job != before.get(job_id)]
        gone = []
        for job_id in before.keys() - now.keys():  # ended, and no longer among the newest
            try:
                changed.append(self._client.jobs.get(job_id))
            except WarmdError:
                gone.append(job_id)
        self._jobs = now
        return {"jobs": changed, "gone": gone} if changed or gone else {}

    def _read_jobs(self) -> dict[str, dict[str, Any]]:
        found = self._client.jobs.all(JobFilter(limit=_NEWEST))
        found += self._client.jobs.all(JobFilter(statuses=("started",)))
        found += self._client.jobs.all(JobFilter(statuses=WAITING, limit=_MAX_WAITING))
        return {job["id"]: job for job in found}

    async def _read_status(self) -> Part:
        """The status of the daemon and its queues, or why there is none, and of the machine."""
        found: Part = {"problem": None}
        try:
            found |= await self._in_control_thread(control.status, self._client.config)
            found["queues"] = await self._in_thread(self._client.jobs.queues)
        except (redis.RedisError, WarmdError) as error:
            found["problem"] = str(error)
        return {**found, "machine": await self._in_thread(self._machine)}

    def _machine(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        disk = shutil.disk_usage(self._client.home.path)
        return {
            "cores": len(os.sched_getaffinity(0)),
            "load": round(os.getloadavg()[0], 2),
            "memory_bytes": memory.total,
            "memory_free_bytes": memory.available,
            "disk_bytes": disk.total,
            "disk_free_bytes": disk.free,
        }
