#!/usr/bin/env python3
"""The dashboard in Chromium: first paint, many requests, runs and completions, and a long curve.

    python tests/benchmarks/page.py [--jobs 10000] [--steps 10000] [--completions 1000] [--pages 10]

The jobs, the curve and the completions are made through the job store, not run. Times are medians;
those of a view are from the request of its address until its content is there, in a page that is
new each time; those of a sort or a filter from the event until the table is drawn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import orjson
import psutil
from browser import Browser
from ended_jobs import end
from gateways import Gateway

from warmd.daemon.runs.events import EventLog
from warmd.daemon.runs.rundir import RunDir
from warmd.daemon.runs.seal import sealed
from warmd.jobs import spec_class
from warmd.jobs.grpo.completions import FILE, Completions

ROUNDS = 5
STEPS_EACH = 20  # of the many runs
METRICS = (
    "loss",
    "reward",
    "grad_norm",
    "learning_rate",
    "entropy",
    "completion_length",
    "seconds",
)
KEPT_STEPS = 20
WORDS = 200  # of a completion
PAGES_EACH = 5  # per browser, which opens at most six connections to one host


def with_curve(home: Gateway, steps: int) -> str:
    """Queue a training whose events have that many steps; return its id."""
    spec = spec_class("grpo").parse({"model": "tiny", "samples": 4, "num_generations": 2})
    job_id = home.client.jobs.submit(spec)
    with EventLog(RunDir(home.home.runs / job_id).events, execution=1) as events:
        for step in range(1, steps + 1):
            metrics = dict.fromkeys(("loss", "reward", "grad_norm"), step % 17 / 17)
            events.emit("step", step=step, tokens=100, **metrics)
    return job_id


def with_runs(home: Gateway, number: int) -> None:
    """Make ended trainings of a few steps whose options differ."""
    for at, job_id in enumerate(end(home.client, number, kind="grpo")):
        rundir = RunDir(home.home.runs / job_id)
        with rundir.events.open("wb") as file:
            for step in range(1, STEPS_EACH + 1):
                metrics = dict.fromkeys(METRICS, (at * 7919 + step) % 1000 / 1000)
                event = {"seq": step, "execution": 1, "time": float(step), "type": "step"}
                file.write(orjson.dumps({**event, "step": step, **metrics}) + b"\n")
        spec = {**rundir.read_spec()["spec"], "learning_rate": 10.0 ** -(at % 6 + 1), "seed": at}
        document = sealed({**rundir.read_spec(), "spec": spec})
        (rundir.path / "spec.json").write_bytes(document)  # without waiting for the disk


def drawn_ms(browser: Browser, act: str) -> float:
    """Milliseconds from an event in the page until the frame with its effect, a median."""
    found = []
    for number in range(ROUNDS):
        browser.js(
            f"window.took = null; const n = {number}; const begun = performance.now(); {act};"
            "requestAnimationFrame(() => setTimeout(() => {"
            " document.body.offsetHeight; window.took = performance.now() - begun }))"
        )
        found.append(float(browser.wait("window.took")))
    return statistics.median(found)


def add_completions(home: Gateway, job_id: str, number: int) -> None:
    """Keep so many completions in each of KEPT_STEPS steps, in groups of eight."""
    file = Completions(home.client.rundir(job_id).path / FILE, every=1, step=0)
    for step in range(1, KEPT_STEPS + 1):
        rows = [
            {
                **{
                    "row": at // 8,
                    "group": at // 8,
                    "prompt": f"Question {at // 8}: " + "why " * 50,
                },
                **{"completion": f"{at} " + "because " * WORDS, "answer": str(at // 8)},
                **{"reward": at % 8 / 7, "rewards": {"correctness": at % 8 / 7, "length": 0.0}},
                **{"advantage": at % 8 / 4 - 0.875, "tokens": WORDS, "stop": "end"},
                "replayed": False,
            }
            for at in range(number)
        ]
        file.add(step, rows)
    file.close()


def shown_in(browser: Browser, address: str, expression: str) -> float:
    """Seconds until an expression is true in a new page, the median of several."""
    seconds = []
    for _ in range(ROUNDS):
        browser.open("about:blank")
        begun = time.perf_counter()
        browser.open(address)
        browser.wait(expression)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def next_step_ms(browser: Browser) -> float:
    """From the button to the frame with the completions of the step before, the median."""
    browser.js(
        "document.body.addEventListener('click', () => { window.begun = performance.now() }, true);"
        "new MutationObserver(() => requestAnimationFrame(() => setTimeout(() => {"
        " window.took = performance.now() - window.begun })))"
        ".observe(document.querySelector('main [role=status]'),"
        " {characterData: true, subtree: true})"
    )
    found = []
    for _ in range(ROUNDS):
        browser.js("window.took = null")
        browser.press("Earlier step")
        found.append(float(browser.wait("window.took")))
    return statistics.median(found)


def first_paint_ms(browser: Browser, address: str) -> float:
    paints = "performance.getEntriesByType('paint').find((p) => p.name == 'first-contentful-paint')"
    found = []
    for _ in range(ROUNDS):
        browser.open("about:blank")
        browser.open(address)
        found.append(float(browser.wait(f"{paints}?.startTime")))
    return statistics.median(found)


def longest_frame_ms(browser: Browser, scroll: str) -> float:
    """The longest time between two frames while the page is scrolled to its end."""
    browser.js(
        "window.longest = 0; let last = performance.now();"
        "const tick = (now) => { window.longest = Math.max(window.longest, now - last); last = now;"
        " requestAnimationFrame(tick) }; requestAnimationFrame(tick);"
        "document.addEventListener('scrollend', () => { window.isScrolled = true });"
        f"{scroll}"
    )
    browser.wait("window.isScrolled === true")
    return float(browser.js("return window.longest"))


def open_pages(url: str, number: int) -> list[Browser]:
    """Open pages that follow the overview, in windows: a page in a hidden tab ends its stream."""
    browsers: list[Browser] = []
    for index in range(number):
        if index % PAGES_EACH == 0:
            browsers.append(Browser())
        else:
            browsers[-1].switch(browsers[-1].new_window())
        browsers[-1].open(f"{url}/")
        # The overview is made of the stream's first event.
        browsers[-1].wait("document.querySelector('.columns') !== null && !document.hidden")
    return browsers


def of_runs(browser: Browser, url: str, number: int) -> list[tuple[str, str]]:
    """Times of the table of runs."""
    table = "document.querySelectorAll('table.runs tbody tr').length >= 100"
    seconds = shown_in(browser, f"{url}/#/runs", table)
    rows = [(f"table of {number:,} runs", f"{seconds * 1e3:.0f} ms")]
    begun = time.perf_counter()
    complete = "!document.querySelector('.toolbar').innerText.includes('reading more')"
    browser.wait(complete, timeout_s=120)
    rows.append(("all of them read", f"{time.perf_counter() - begun:.1f} s"))
    buttons = "[...document.querySelectorAll('button.sort')]"
    sort = f"{buttons}.find((one) => one.innerText.split(' ')[0] === 'reward')"
    rows.append(("sorted by a metric", f"{drawn_ms(browser, f'{sort}.click()'):.0f} ms"))
    search = (
        "const input = document.querySelector('input[name=text]');"
        "input.value = ['grpo-2', 'tiny', '', 'grpo-20', 'x7'][n];"
        "input.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    rows.append(("filtered by a text", f"{drawn_ms(browser, search):.0f} ms"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--completions", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=10)
    options = parser.parse_args()
    rows: list[tuple[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text('{"max_position_embeddings": 256}')
        home = Gateway(Path(folder) / "home", model)
        job_id = with_curve(home, options.steps)
        end(home.client, options.jobs)
        browser = Browser()
        browser.resize(1280)
        rows.append(("first paint", f"{first_paint_ms(browser, f'{home.url}/'):.0f} ms"))
        listed = "document.querySelectorAll('tbody tr').length >= 50"
        seconds = shown_in(browser, f"{home.url}/#/requests", listed)
        rows.append((f"list of {options.jobs:,} requests", f"{seconds * 1e3:.0f} ms"))
        for number in range(100, 501, 50):
            browser.press("Older requests")
            browser.wait(f"document.querySelectorAll('tbody tr').length >= {number}")
        frame = longest_frame_ms(browser, "window.scrollTo({top: 1e6, behavior: 'smooth'})")
        rows.append(("longest frame, 500 of them scrolled", f"{frame:.0f} ms"))
        curve = "document.querySelector('figure [role=img]')?.plot?.data[0].length > 1"
        seconds = shown_in(browser, f"{home.url}/#/jobs/{job_id}", curve)
        rows.append((f"curves of {options.steps:,} steps", f"{seconds * 1e3:.0f} ms"))
        points = browser.js(
            "return document.querySelector('figure [role=img]').plot.data[0].length"
        )
        rows.append(("points drawn of them", points))
        with_runs(home, options.jobs)
        rows += of_runs(browser, home.url, options.jobs)
        add_completions(home, job_id, options.completions)
        prompts = "document.querySelectorAll('.prompts .member').length > 100"
        address = f"{home.url}/#/jobs/{job_id}/completions"
        seconds = shown_in(browser, address, prompts)
        rows.append((f"{options.completions:,} completions of a step", f"{seconds * 1e3:.0f} ms"))
        rows.append(("the step before, on the same page", f"{next_step_ms(browser):.0f} ms"))
        gateway = psutil.Process(home.process.pid)
        before = gateway.memory_full_info().uss
        browsers = [browser, *open_pages(home.url, options.pages)]
        grown = (gateway.memory_full_info().uss - before) / 1e6
        rows.append((f"the gateway's memory for {options.pages} more pages", f"{grown:.2f} MB"))
        for one in browsers:
            one.close()
        home.close()
    sys.stdout.writelines(f"{name:<44}{value}\n" for name, value in rows)


if __name__ == "__main__":
    main()
