"""The dashboard in a browser: opening views, jobs for them, accessibility."""

from __future__ import annotations

from browser import Browser
from daemons import Daemon
from waiting import wait_until

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
WIDTHS = (360, 768, 1440)
OPTIONS = {  # of a GRPO job that ends within seconds
    **{"model": "tiny", "samples": 4, "num_generations": 2, "max_completion_length": 4},
    "template": "{question}=",
}
STEPS = 100_000  # more than any test waits for


class Page:
    """The dashboard of a daemon or a gateway in the browser."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        self.url = url

    def open(self, view: str = "") -> Browser:
        self.browser.open("about:blank")
        self.browser.open(f"{self.url}/#/{view}")
        self.browser.wait("document.querySelector('h1') !== null")
        return self.browser


def running(daemon: Daemon) -> str:
    """Submit a job that runs until it is stopped, and wait for its second step."""
    job_id = daemon.submit("behaviours:paced", samples=40, epochs=STEPS // 40)
    wait_until(lambda: len(daemon.events(job_id, "step")) > 1, timeout_s=60)
    return job_id


def finished(daemon: Daemon) -> str:
    job_id = daemon.submit()
    assert daemon.wait(job_id)["status"] == "finished"
    return job_id


def assert_clean(browser: Browser) -> None:
    """Assert that axe-core finds nothing, the console has no error, and nothing overflows."""
    assert browser.axe() == []
    assert browser.problems() == []
    wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert browser.js(f"return {wide}"), "the page scrolls sideways"
