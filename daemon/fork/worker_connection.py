"""The horse's end of the connection to its worker.

Events and outcomes go out; jobs and requests to stop or pause one come in. When the worker dies
the connection closes, and the horse ends at once: another worker resumes its jobs.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from ..host.channel import Channel
from ..host.descendants import end_descendants
from ..host.messages import DropAdapter, JobEvent, Message, PauseJob, RunJob, StopJob

_BATCH_S = 0.01  # how long an event waits for events of other jobs
_MAX_END_S = 1.0  # for a job's processes to die when the horse ends at once


class JobControl:
    """The worker's requests to a running job."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.pause = threading.Event()
        self.reason = "drain"  # for the stop


class WorkerConnection:
    """Sends messages to the worker; a thread reads what comes in."""

    def __init__(
        self, channel: Channel, request: RunJob, *, unload_model: Callable[[str], None]
    ) -> None:
        """`request`: the first job; the zygote has received it. `unload_model`: for DropAdapter."""
        self.channel = channel
        self._unload_model = unload_model
        self._controls = {request.job_id: JobControl()}  # by job id
        self._requests = [request]
        self._arrived = threading.Condition()
        self._unsent: list[Message] = []
        self._sending = threading.Condition()
        self._pid = os.getpid()
        signal.signal(signal.SIGTERM, self._stop_all)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.register_at_fork(after_in_child=self._close_in_fork)
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        threading.Thread(target=self._send_batches, name="send", daemon=True).start()

    def _close_in_fork(self) -> None:
        """Close the connection in a process that the job's own code forks.

        A copy of the connection would hide the horse's death from the worker; and with the
        horse's signal handlers `multiprocessing.Pool.terminate` would never return.
        """
        self.channel.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _stop_all(self, *_: Any) -> None:
        for control in list(self._controls.values()):
            control.stop.set()

    def _receive(self) -> None:
        for message in self.channel:
            match message:
                case RunJob():
                    with self._arrived:
                        self._controls[message.job_id] = JobControl()
                        self._requests.append(message)
                        self._arrived.notify()
                case StopJob() if message.job in self._controls:  # or it has just ended
                    control = self._controls[message.job]
                    control.reason = message.reason
                    control.stop.set()
                case PauseJob() if message.job in self._controls:
                    pause = self._controls[message.job].pause
                    pause.set() if message.is_paused else pause.clear()
                case DropAdapter():
                    self._unload_model(message.name)
        self._end_process()

    def _end_process(self) -> NoReturn:
        """End at once: the worker is gone."""
        if os.getpid() == self._pid:
            end_descendants(within_s=_MAX_END_S)
        os._exit(0)

    def next_request(self) -> tuple[RunJob, JobControl]:
        """Wait for the next job; return it with the JobControl of later requests."""
        with self._arrived:
            while not self._requests:
                self._arrived.wait()
            request = self._requests.pop(0)
            return request, self._controls[request.job_id]

    @property
    def is_idle(self) -> bool:
        """Whether no job runs or waits here."""
        return not self._controls

    def drop_job(self, job_id: str) -> None:
        """Ignore further requests for a job: it has ended."""
        self._controls.pop(job_id, None)

    def send(self, message: Message) -> None:
        """Send a message; while several jobs run, their events are sent in batches.

        Sending each token's event by itself would take CPU time from decoding, at every process
        that it passes through.
        """
        with self._sending:
            self._unsent.append(message)
            if not isinstance(message, JobEvent) or len(self._controls) == 1:
                self._send_all()
            elif len(self._unsent) == 1:
                self._sending.notify()

    def _send_batches(self) -> None:
        """Send what `send` has left unsent; never returns."""
        with self._sending:
            while True:
                self._sending.wait_for(lambda: self._unsent)
                self._sending.wait(_BATCH_S)
                self._send_all()

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, []
        try:
            self.channel.send(*unsent)
        except OSError:
            self._end_process()
