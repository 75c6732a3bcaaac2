"""The table of runs and the evaluations of the dashboard, in a real browser with a real daemon."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import orjson
import pytest
from browser import Browser
from daemons import Daemon
from dashboard import HOSTILE, OPTIONS, WIDTHS, assert_clean, running
from waiting import wait_until

from warmd.daemon.lifecycle.queueing import Queueing
from warmd.daemon.lifecycle.view import JobFilter
from warmd.jobs import spec_class

pytestmark = pytest.mark.nightly(
    part="page", catches="a table of runs that hides, misplaces or mislabels a run or its numbers"
)

EVAL = {"model": "tiny", "samples": 8, "max_tokens": 4}
SCHEMES = ("light", "dark")


def submitted(daemon: Daemon, kind: str, name: str, *tags: str, **options: Any) -> str:
    spec = spec_class(kind).parse(options)
    job_id = daemon.client.jobs.submit(spec, Queueing(name=name, tags=tags))
    assert daemon.wait(job_id)["status"] == "finished"
    return job_id


@pytest.fixture(scope="module")
def runs(daemon: Daemon) -> dict[str, str]:
    """The ids of two trainings, two evaluations and a sweep by their names."""
    trained = {**OPTIONS, "eval_samples": 4}
    found = {
        "slow": submitted(daemon, "grpo", "slow", "paper", **trained, learning_rate=1e-5),
        "fast": submitted(daemon, "grpo", "fast", **trained, learning_rate=1e-3),
        "greedy": submitted(daemon, "eval", "greedy", **EVAL),
        "hot": submitted(daemon, "eval", "hot", **EVAL, temperature=2.0),
    }
    sweep = daemon.client.groups.submit_sweep(
        "grpo", trained, {"sweep": {"learning_rate": ["1e-5", "1e-4"]}}, Queueing(name="rates")
    )
    wait_until(lambda: daemon.client.groups.sweep(sweep)["status"] == "finished", timeout_s=120)
    return {**found, "rates": sweep}


def opened(page: Any) -> Browser:
    """The table of runs as a new user has it, when all of it is read."""
    page.open("runs").js("localStorage.clear()")
    browser: Browser = page.open("runs")
    browser.wait("document.querySelector('table.runs') !== null")
    browser.wait("!document.querySelector('.toolbar').innerText.includes('reading more')")
    return browser


def names(browser: Browser) -> list[str]:
    """What the rows of the table are called, from top to bottom."""
    script = (
        "return [...document.querySelectorAll('table.runs tbody .name a')].map((a) => a.innerText)"
    )
    found: list[str] = browser.js(script)
    return found


def only(browser: Browser, *wanted: str) -> None:
    wait_until(lambda: sorted(names(browser)) == sorted(wanted))


def scheme(browser: Browser, name: str | None) -> None:
    features = [] if name is None else [{"name": "prefers-color-scheme", "value": name}]
    browser.cdp("Emulation.setEmulatedMedia", features=features)


def test_runs_are_filtered_by_text_kind_tag_and_sweep_and_the_address_keeps_it(page, runs):
    browser = opened(page)
    browser.type("input[name=text]", "SLOW paper")
    only(browser, "slow")
    browser.type("input[name=text]", "no such run")
    browser.wait_for("No run fits these filters.")
    browser.press("Clear the filters")
    browser.choose("select[name=kind]", "eval")
    wait_until(lambda: {"greedy", "hot"} <= set(names(browser)))
    assert "slow" not in names(browser)
    browser.choose("select[name=kind]", "")
    browser.choose("select[name=tag]", "paper")
    only(browser, "slow")
    address = browser.js("return location.hash")
    assert address == "#/runs?tag=paper"
    page.open(address.removeprefix("#/"))
    only(browser, "slow")
    browser.choose("select[name=tag]", "")
    browser.choose("select[name=sweep]", runs["rates"])
    only(browser, "rates/1", "rates/2")


def test_runs_are_sorted_by_a_column_in_both_directions(page, runs):
    browser = opened(page)
    browser.type("input[name=text]", "grpo")
    columns = "[...document.querySelectorAll('th[aria-sort]')]"
    column = f"{columns}.find((th) => th.innerText.startsWith(arguments[0]))"
    browser.press("learning_rate")
    browser.wait(f"{column}.ariaSort === 'descending'", "learning_rate")
    first = names(browser)
    assert first.index("fast") < first.index("slow")
    browser.press("learning_rate ↓")
    browser.wait(f"{column}.ariaSort === 'ascending'", "learning_rate")
    second = names(browser)
    assert second.index("slow") < second.index("fast")
    page.open("runs")  # the order is kept
    browser.wait(f"{column}?.ariaSort === 'ascending'", "learning_rate")


def test_a_sweep_is_one_row_that_unfolds_and_can_be_ungrouped(page, runs):
    browser = opened(page)
    browser.wait("document.querySelector('tr.group') !== null")
    assert "rates/1" not in names(browser)
    row = "[...document.querySelectorAll('tr.group')].find((tr) => tr.innerText.includes('rates'))"
    assert "0.00001 \N{EN DASH} 0.0001" in browser.js(f"return {row}.innerText")
    browser.press(f"Runs of {runs['rates']}")
    wait_until(lambda: {"rates/1", "rates/2"} <= set(names(browser)))
    browser.press(f"Runs of {runs['rates']}")
    wait_until(lambda: "rates/1" not in names(browser))
    browser.click("input[name=grouped]")
    wait_until(lambda: {"rates/1", "rates/2"} <= set(names(browser)))
    assert "rates" not in names(browser)


def test_columns_are_chosen_and_stay_chosen(page, runs):
    browser = opened(page)
    headers = "[...document.querySelectorAll('table.runs thead th')].map((th) => th.innerText)"
    assert {"learning_rate", "eval_reward", "Kind"} <= set(browser.js(f"return {headers}"))
    browser.press_summary("Columns")
    browser.type("input[name=column]", "grad")
    browser.click("input[name='last.grad_norm']")
    browser.wait(f"{headers}.includes('grad_norm')")
    page.open("runs")
    browser.wait(f"{headers}.includes('grad_norm')")
    browser.press_summary("Columns")
    browser.press("Choose automatically")
    browser.wait(f"!{headers}.includes('grad_norm')")


def test_selected_runs_are_drawn_together_with_their_names(page, runs):
    browser = opened(page)
    for name in ("slow", "fast"):
        browser.click(f"input[aria-label='Select {name}']")
    browser.wait("document.querySelectorAll('.plot figure').length > 1")
    text = browser.wait("document.querySelector('.plot figure').innerText")
    assert "eval_reward" in text
    assert {"slow", "fast"} <= {line.split(" ")[0] for line in text.split("\n")}  # and values
    browser.choose("select[name=metric]", "loss")
    browser.wait("document.querySelectorAll('.plot figure').length === 1")
    browser.wait_for("2 selected")
    browser.press("Clear the selection")
    browser.wait("document.querySelector('.plot') === null")


def test_a_running_training_appears_and_its_metrics_grow(page, daemon, runs):
    browser = opened(page)
    job_id = running(daemon)
    browser.wait_for(job_id)
    row = f"document.querySelector('input[aria-label=\"Select {job_id}\"]').closest('tr')"
    browser.wait(f"{row}.querySelector('.status').innerText === 'running'")
    step = browser.wait(f"{row}.querySelector('.count').innerText")
    browser.wait(f"{row}.querySelector('.count').innerText !== arguments[0]", step)
    rewards = f"[...{row}.querySelectorAll('td.number')].map((cell) => cell.innerText).join()"
    before = browser.js(f"return {rewards}")
    browser.wait(f"{rewards} !== arguments[0]", before)


def test_failed_trainings_need_attention_until_they_are_dismissed_and_requests_do_not(page, daemon):
    (daemon.folder / "broken").touch()
    failed = daemon.submit("behaviours:raises")
    too_long = {"model": "tiny", "prompt": "1" * 1000}
    assert httpx.post(f"{page.url}/v1/completions", json=too_long, timeout=60).status_code == 400
    request = daemon.client.jobs.all(JobFilter(kinds=["infer"], limit=1))[0]["id"]
    assert {daemon.wait(job_id)["status"] for job_id in (failed, request)} == {"failed"}
    (daemon.folder / "broken").unlink()
    short = {"model": "tiny", "prompt": "1", "max_tokens": 1}
    for _ in range(21):  # one more than the jobs that the overview's stream follows
        assert httpx.post(f"{page.url}/v1/completions", json=short, timeout=60).status_code == 200
    browser = page.open()
    notes = "document.querySelector('.attention')?.innerText ?? ''"
    browser.wait(f"({notes}).includes(arguments[0])", failed)
    assert request not in browser.js(f"return {notes}")
    button = browser.js(
        "return [...document.querySelectorAll('.attention li')]"
        ".find((li) => li.innerText.includes(arguments[0])).querySelector('button').ariaLabel",
        failed,
    )
    browser.press(button)
    browser.wait(f"!({notes}).includes(arguments[0])", failed)
    browser = page.open()
    browser.wait("document.querySelector('.columns') !== null")
    assert failed not in browser.js(f"return {notes}")
    browser = page.open("requests?status=failed")
    browser.wait_for(request)


def test_former_addresses_and_unknown_ones_lead_somewhere(page, runs):
    browser = page.open("jobs")
    browser.wait("document.querySelector('h1').innerText === 'Runs'")
    browser = page.open(f"jobs/{runs['slow']}")
    browser.wait("document.querySelector('nav.sections') !== null")
    browser = page.open("nowhere")
    browser.wait_for("No such view")
    browser = page.open("requests?kind=encode&text=zzzz")
    browser.wait_for("No request fits these filters.")


def test_the_leaderboard_has_the_best_first_and_leads_to_the_questions(page, runs):
    browser = page.open("evaluations")
    browser.wait_for("arithmetic, task reward, 8 questions")
    rows = browser.js(
        "return [...document.querySelectorAll('.board tbody tr')].map((tr) => tr.innerText)"
    )
    values = [float(row.split("\t")[2]) for row in rows]
    assert values == sorted(values, reverse=True)
    assert all(" to " in row for row in rows)
    browser.open(f"{page.url}/#/evaluations/{runs['hot']}?against={runs['greedy']}")
    browser.wait("document.querySelectorAll('table.questions tbody tr').length === 8")
    header = browser.js("return document.querySelector('table.questions thead').innerText")
    assert "hot (tiny)" in header
    assert "greedy (tiny)" in header
    browser.wait("document.querySelector('.verdict') !== null")
    browser.choose("select[name=only]", "different")
    browser.type("input[name=text]", "no such text")
    browser.wait_for("No question fits.")
    browser.choose("select[name=against]", "")
    browser.wait("document.querySelectorAll('table.questions thead th').length === 4")


def test_an_evaluation_is_submitted_from_the_page_and_joins_the_leaderboard(page, daemon, runs):
    browser = page.open("evaluations")
    browser.press("Evaluate a model …")
    browser.wait("document.querySelector('select[name=model]')?.value === 'tiny'")
    browser.type("input[name=reward]", "wrong")
    browser.press("Evaluate")
    browser.wait_for("options.reward: must be one of correctness")
    browser.type("input[name=reward]", "correctness")
    browser.type("input[name=samples]", "8")
    browser.type("input[name=name]", "from-page")
    browser.choose("select[name=against]", runs["greedy"])
    browser.press_summary("More options")
    browser.type("input[name=max_tokens]", "4")
    browser.press("Evaluate")
    browser.wait_for("from-page is queued")
    board = "document.querySelector('.board')?.innerText.includes('from-page')"
    browser.wait(board, timeout_s=60)
    found = daemon.client.jobs.all()[0]
    assert (found["name"], found["result"]["against"]) == ("from-page", runs["greedy"])


def test_texts_in_tables_of_runs_and_questions_are_never_code(page, daemon):
    job_id = submitted(daemon, "eval", "hostile", **EVAL)
    rundir = daemon.client.rundir(job_id)
    row = {"row": 1, "question": "a", "prompt": HOSTILE, "answer": HOSTILE}
    row |= {"completions": [{"text": HOSTILE, "scores": {}}], "metrics": {HOSTILE: 1.0}}
    (rundir.path / "rows.jsonl").write_bytes(orjson.dumps(row) + b"\n")
    rundir.annotate(spec={**rundir.read_spec()["spec"], "template": HOSTILE})
    for view in ("runs?text=hostile", f"evaluations/{job_id}"):
        browser = page.open(view)
        browser.wait_for("hostile")
        if view.startswith("runs"):
            browser.press_summary("Columns")
            browser.click("input[name='option.template']")
        browser.wait_for("onerror")
        assert browser.js("return window.hacked") is None
        assert browser.js("return document.querySelectorAll('main img, main script').length") == 0


@pytest.mark.parametrize("colors", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_runs_and_evaluations_are_accessible_and_fit_the_screen(
    page, runs, tmp_path, width, colors
):
    page.browser.resize(width)
    scheme(page.browser, colors)
    try:
        browser = opened(page)
        browser.press(f"Runs of {runs['rates']}")
        browser.click("input[aria-label='Select fast']")
        browser.press_summary("Columns")
        browser.wait("document.querySelector('.plot figure') !== null")
        browser.screenshot(tmp_path / f"runs-{width}-{colors}.png")
        assert_clean(browser)
        for name, view, text in (
            ("evaluations", "evaluations?model=tiny", "8 questions"),
            ("questions", f"evaluations/{runs['hot']}?against={runs['greedy']}", "hot (tiny)"),
            ("compare", f"compare?job={runs['slow']}&job={runs['fast']}", "Options that differ"),
        ):
            browser = page.open(view)
            browser.wait_for(text)
            browser.screenshot(tmp_path / f"{name}-{width}-{colors}.png")
            assert_clean(browser)
    finally:
        scheme(page.browser, None)
