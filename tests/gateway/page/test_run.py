"""A run on the dashboard: its name, result, charts, options with their values, and events."""

from __future__ import annotations

import pytest
from daemons import Daemon
from dashboard import HOSTILE, OPTIONS, WIDTHS, assert_clean
from waiting import wait_until

from warmd.daemon.lifecycle.queueing import Queueing
from warmd.daemon.runs.events import EventLog
from warmd.jobs import spec_class

pytestmark = pytest.mark.nightly(
    part="page",
    catches="a run whose page hides its result, its values or the reason of its failure",
)

SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def run(daemon: Daemon) -> str:
    """A finished GRPO job with a name, held-out evaluations and a warning."""
    values = {**OPTIONS, "samples": 8, "eval_samples": 4, "eval_every": 2}
    queueing = Queueing(name="first-run", tags=("demo",))
    job_id = daemon.client.jobs.submit(spec_class("grpo").parse(values), queueing)
    assert daemon.wait(job_id)["status"] == "finished"
    with EventLog(daemon.client.rundir(job_id).events, execution=1) as log:
        log.emit("warning", message=f"nothing is learned: see `warmd samples` {HOSTILE}")
    return job_id


@pytest.fixture(scope="module")
def failed(daemon: Daemon) -> str:
    broken = daemon.folder / "broken"  # while it exists, the reward raises
    broken.touch()
    job_id = daemon.submit("behaviours:raises")
    assert daemon.wait(job_id)["status"] == "failed"
    broken.unlink()
    return job_id


def test_the_first_screen_has_the_name_and_the_result(page, run):
    browser = page.open(f"jobs/{run}")
    browser.wait_for("held-out reward")
    assert browser.js("return document.querySelector('h1').innerText") == "first-run"
    assert browser.js("return document.title") == "first-run · warmd"
    tiles = browser.js("return document.querySelector('.tiles').innerText")
    assert "→" in tiles
    assert "n = 4" in tiles
    assert "training reward" in tiles
    browser.press_summary("1 warning")
    link = "[...document.querySelectorAll('details.attention a')].map((a) => a.hash)"
    assert browser.js(f"return {link}") == [f"#/jobs/{run}/completions"]
    assert browser.js("return window.hacked") is None


def test_charts_come_in_groups_with_training_and_held_out_in_one(page, run):
    browser = page.open(f"jobs/{run}")
    browser.wait("document.querySelector('figure') !== null")
    groups = browser.js(
        "return [...document.querySelectorAll('section h2')].map((h) => h.innerText)"
    )
    assert groups == ["Learning", "Completions", "Speed"]
    titles = browser.js(
        "return [...document.querySelectorAll('.term button')].map((b) => b.innerText)"
    )
    assert len(titles) == len(set(titles)), "one metric has two charts"
    reward = (
        "[...document.querySelectorAll('figure')].find((f) => f.innerText.startsWith('reward'))"
    )
    assert "held out" in browser.js(f"return {reward}.innerText")
    browser.js(f"{reward}.querySelector('.term button').click()")
    browser.wait(f"{reward}.innerText.includes('Mean reward of the completions')")
    browser.press_summary("Numbers")
    # Metrics with one value in all steps are a list.
    folded = browser.js("return document.querySelector('.constants').textContent")
    assert "clip_ratio" in folded


def test_labels_of_negative_values_are_whole(page, run, daemon):
    with EventLog(daemon.client.rundir(run).events, execution=1) as log:
        for step in (9, 10):
            log.emit("step", step=step, tiny=-1e-5 * step)
    browser = page.open(f"jobs/{run}")
    browser.wait("document.querySelector('figure') !== null")
    plots = "[...document.querySelectorAll('figure')].find((f) => f.innerText.startsWith('tiny'))"
    axis = browser.js(f"return {plots}.querySelector('[role=img]').plot.axes[1]._size")
    assert axis >= 8 * len("-1.00e-4"), "the minus sign is cut"


def test_four_charts_are_in_a_row_of_a_wide_screen(page, run):
    page.browser.resize(1440)
    browser = page.open(f"jobs/{run}")
    browser.wait("document.querySelectorAll('figure').length > 4")
    tops = browser.js(
        "return [...document.querySelectorAll('.charts')[0].querySelectorAll('figure')]"
        ".map((f) => f.getBoundingClientRect().top)"
    )
    assert tops.count(tops[0]) == 4


def test_a_failed_run_opens_on_its_error_and_log(page, failed):
    browser = page.open(f"jobs/{failed}")
    browser.wait_for("RuntimeError: the reward is broken")
    browser.wait("document.querySelector('.sections [aria-current]')?.innerText === 'log'")
    browser.wait("document.querySelector('main pre')?.innerText.includes('Traceback')")


def test_all_charts_show_their_values_under_the_mouse(page, run):
    browser = page.open(f"jobs/{run}")
    browser.wait("document.querySelectorAll('.u-over').length > 2")
    captions = "[...document.querySelectorAll('figcaption')].slice(0, 3).map((c) => c.innerText)"

    def shown_at(*parts: float) -> list[str]:
        for part in parts:  # of the width of the first chart
            x, y = browser.js(
                "const over = document.querySelector('.u-over').getBoundingClientRect();"
                "return [over.left + arguments[0] * over.width, over.top + 20]",
                part,
            )
            browser.cdp("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        found: list[str] = browser.js(f"return {captions}")
        return found

    wait_until(lambda: all("\nat " in text for text in shown_at(0.6, 0.5)), timeout_s=20)
    wait_until(lambda: not any("\nat " in text for text in shown_at(-1)), timeout_s=20)


def test_options_show_the_values_that_were_chosen(page, run):
    browser = page.open(f"jobs/{run}/options")
    browser.wait_for("First prompt")
    rows = browser.js(
        "return Object.fromEntries([...document.querySelectorAll('tbody tr')].map("
        "(row) => [row.cells[0].innerText, row.cells[1].innerText.split('\\n')]))"
    )
    assert rows["learning_rate"] == ["0.0003", "chosen"]
    assert rows["samples"] == ["8"]
    assert not [name for name, value in rows.items() if value[0] == "none"]


def test_events_are_sentences(page, run):
    browser = page.open(f"jobs/{run}/events")
    browser.wait_for("held out: reward")
    shown = browser.js("return document.querySelector('main table').innerText")
    assert "{" not in shown.replace(HOSTILE, "")
    assert "n = 4" in shown
    browser.wait("document.querySelector('td a[href$=completions]') !== null")
    browser.click("input[type=checkbox]")
    browser.wait("document.querySelector('table')?.innerText.includes('grad norm')")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_is_accessible_and_fits_the_screen_in_both_schemes(
    page, run, failed, tmp_path, width
):
    page.browser.resize(width)
    views = {
        "run": f"jobs/{run}",
        "options": f"jobs/{run}/options",
        "events": f"jobs/{run}/events",
        "failed": f"jobs/{failed}",
    }
    try:
        for scheme in SCHEMES:
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            page.browser.cdp("Emulation.setEmulatedMedia", features=media)
            for name, view in views.items():
                browser = page.open(view)
                browser.wait("!document.body.innerText.includes('Loading')")
                browser.wait("document.querySelector('.tiles, pre') !== null")
                browser.screenshot(tmp_path / f"{name}-{width}-{scheme}.png")
                assert_clean(browser)
    finally:
        page.browser.cdp("Emulation.setEmulatedMedia", features=[])
