"""Chat templates are bounded in time and memory, and harm no other process."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
from running import running
from waiting import wait_until

from warmd.jobs.errors import JobFailed, WarmdError
from warmd.jobs.files.chats import Chat
from warmd.jobs.models import template_renderer
from warmd.jobs.models.chat_templates import ChatTemplate, TooLarge, TooSlow, render
from warmd.jobs.models.template_renderer import MEMORY_BYTES
from warmd.jobs.user_code import limited_processes

CHAT = Chat([{"role": "user", "content": "abc"}])
PLAIN = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}{{ eos }}", {"eos": "."})
ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


def renderers() -> list[psutil.Process]:
    """The processes that render for this one."""
    return running(template_renderer.__name__)


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    limited_processes.end_idle()  # those of other tests
    yield
    limited_processes.end_idle()
    assert renderers() == []


class Sampled:
    """The most memory that the children of this process had, read each millisecond."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._has_ended.wait(0.001):
            for child in renderers():  # before it has its own program, it is not one of these
                with suppress(psutil.NoSuchProcess):
                    self.most_bytes = max(self.most_bytes, child.memory_info().rss)

    def __enter__(self) -> Sampled:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{% for m in messages %}{{ m.content * 10**10 }}{% endfor %}",
        "{{ 'a' | center(10**10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '{:>10000000000}'.format(1) }}",
        pytest.param(
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
            "{% endfor %}{{ ns.x }}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{% set ns = namespace(x=[0]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
            "{% endfor %}{{ ns.x }}",
            marks=pytest.mark.slow,
        ),
        "{% for i in range(99999) %}{{ 'abcdefghij' * 10000 }}{% endfor %}",
        "{{ messages[0].content * 20000000 }}",
    ],
    ids=["constant", "list", "variable", "filter", "percent", "format", "doubled",
         "doubled list", "loop", "long text"],
)  # fmt: skip
def test_a_template_that_wants_gigabytes_is_refused_in_one_line(source):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Sampled() as sampled, pytest.raises(TooLarge) as refused:
        render(ChatTemplate(source, {}), CHAT)
    assert str(refused.value) in (
        "messages: the chat template needs more than 256 MiB of memory",
        "messages: the chat template writes 60,000,000 characters, at most 32,000,000 are taken",
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown << 10 < 20e6
    assert sampled.most_bytes < MEMORY_BYTES + 50e6  # 50: of Python's own files
    assert render(PLAIN, CHAT) == "abc."


def test_one_operation_that_takes_minutes_is_ended_by_the_limit():
    begun = time.monotonic()
    with pytest.raises(TooSlow, match=r"messages: the chat template takes longer than 0\.5 s"):
        render(ChatTemplate("{{ 10 ** (10 ** 8) }}", {}), CHAT, limit_s=0.5)
    assert time.monotonic() - begun < 5
    assert render(PLAIN, CHAT) == "abc."


def test_a_template_is_compiled_once_and_a_chat_takes_less_than_a_step(monkeypatch):
    render(PLAIN, CHAT)
    (process,) = renderers()
    begun = time.perf_counter()
    for _ in range(100):
        assert render(PLAIN, CHAT) == "abc."
    assert time.perf_counter() - begun < 1  # 0.05 s where nothing else runs
    assert renderers() == [process]


def hang(number: int, *, limit_s: float) -> tuple[list[threading.Thread], list[WarmdError]]:
    """Render this many endless templates concurrently; return the threads and their errors."""
    errors: list[WarmdError] = []

    def render_one() -> None:
        try:
            render(ChatTemplate(ENDLESS, {}), CHAT, limit_s=limit_s)
        except WarmdError as error:
            errors.append(error)

    threads = [threading.Thread(target=render_one) for _ in range(number)]
    for thread in threads:
        thread.start()
    return threads, errors


@pytest.mark.slow
def test_templates_that_never_end_do_not_affect_other_chats():
    threads, errors = hang(3, limit_s=120)
    hanging = wait_until(lambda: len(found := renderers()) == len(threads) and found)
    wait_until(lambda: all(one.cpu_times().user > 0.3 for one in hanging))  # a start takes less
    assert render(PLAIN, CHAT) == "abc."
    # It waited for none of them.
    assert errors == []
    assert set(hanging) < set(renderers())
    for process in hanging:
        process.kill()
    for thread in threads:
        thread.join()
    assert len(errors) == len(threads)

    threads, errors = hang(3, limit_s=0.5)
    for thread in threads:
        thread.join()
    assert [str(error) for error in errors] == [
        "messages: the chat template takes longer than 0.5 s"
    ] * 3
    assert render(PLAIN, CHAT) == "abc."


@pytest.mark.parametrize("is_busy", [False, True], ids=["waiting", "rendering"])
def test_a_killed_process_is_replaced(is_busy):
    render(PLAIN, CHAT)
    (process,) = renderers()
    if is_busy:
        timer = threading.Timer(0.2, process.kill)
        timer.start()
        with pytest.raises(JobFailed, match="messages: the process of the chat template ended"):
            render(ChatTemplate(ENDLESS, {}), CHAT)
    else:
        process.kill()
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert render(PLAIN, CHAT) == "abc."


@pytest.mark.slow
def test_a_process_that_renders_forever_ends_soon_after_its_parent():
    program = (
        "from warmd.jobs.files.chats import Chat\n"
        "from warmd.jobs.models.chat_templates import ChatTemplate, render\n"
        f"render(ChatTemplate({ENDLESS!r}, {{}}), Chat([]), limit_s=2)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    children: list[psutil.Process] = wait_until(psutil.Process(parent.pid).children)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    # Its parent is now another one, so it is seen by its id.
    wait_until(
        lambda: not children[0].is_running() or not os.path.exists(f"/proc/{children[0].pid}")
    )
