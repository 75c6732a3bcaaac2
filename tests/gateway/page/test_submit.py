"""The form of the dashboard for trainings and sweeps, in a real browser with a real daemon."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from browser import Browser
from dashboard import HOSTILE, OPTIONS, WIDTHS, assert_clean
from waiting import wait_until

from warmd.jobs import spec_class

pytestmark = pytest.mark.nightly(
    part="page", catches="a form that submits something else than it shows, or hides why not"
)

SUBMIT = "document.querySelector('.submit-bar .primary')?"
COMMAND = "document.querySelector('pre.command')?.textContent"


def fill(browser: Browser, **texts: str) -> None:
    """Type into fields, also those of folded parts."""
    for name, text in texts.items():
        browser.find(f"form [name={name}]")
        browser.js(
            "const part = document.querySelector(arguments[0]).closest('details');"
            "if (part) part.open = true",
            f"form [name={name}]",
        )
        browser.type(f"form [name={name}]", text)


def sums(folder: Path, number: int = 40) -> Path:
    """Write a CSV file of problems."""
    path = folder / "sums.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["question", "answer"])
        rows.writerows([f"{n} + 1 = ?", str(n + 1)] for n in range(number))
    return path


def test_a_named_training_is_submitted_with_an_evaluation(page, daemon):
    browser = page.open("submit")
    browser.choose("select[name=kind]", "grpo")
    fill(browser, num_generations="2", max_completion_length="4", samples="6")
    fill(browser, template="{question}=", name="sums", tags="first, small", eval_samples="4")
    browser.wait_for("6 steps.")
    command = browser.wait(COMMAND)
    assert command.startswith("warmd submit grpo ")
    for part in ("--samples 6", "--eval-samples 4", "--name sums --tag first --tag small"):
        assert part in command
    browser.press("Submit")
    browser.wait("location.hash.startsWith('#/jobs/grpo-')")
    job_id = browser.js("return location.hash").split("/")[2]
    assert daemon.wait(job_id)["status"] == "finished"
    job = daemon.client.jobs.get(job_id)
    assert (job["name"], job["tags"]) == ("sums", ["first", "small"])
    assert daemon.events(job_id, "eval")  # before and after
    assert browser.problems() == []


def test_an_evaluation_is_on_unless_it_is_switched_off(page):
    browser = page.open("submit")
    browser.choose("select[name=kind]", "grpo")
    browser.wait(f"{COMMAND}?.includes('--eval-samples 16')")
    browser.click("input[name=evaluate]")
    browser.wait(f"{COMMAND}?.includes('--eval-samples') === false")


def test_errors_are_next_to_their_field_in_words_and_disable_the_button(page):
    browser = page.open("submit")
    browser.choose("select[name=kind]", "grpo")
    browser.wait_for("80 steps.")
    fill(browser, num_generations="1")
    browser.wait_for("num generations: must be an integer of at least 2")
    assert "method." not in browser.text()
    assert browser.js(f"return {SUBMIT}.disabled")
    assert browser.js("return document.querySelector('.preview pre') !== null")  # it still is one
    browser.js("document.querySelectorAll('form details').forEach((one) => { one.open = false })")
    browser.press("Show the field")
    assert browser.js("return document.activeElement.name") == "num_generations"
    fill(browser, num_generations="2", name="no name")
    browser.wait_for("name: must be 1 to 64 letters")
    fill(browser, name="good")
    browser.wait(f"{SUBMIT}.disabled === false")


def test_the_button_is_in_view_on_screens_of_all_sizes(page, tmp_path):
    browser = page.open("submit")
    browser.wait_for("80 steps.")
    for width in WIDTHS:
        browser.resize(width)
        place = browser.js(f"return {SUBMIT}.getBoundingClientRect().bottom")
        assert place <= browser.js("return innerHeight")
        for scheme in ("light", "dark"):
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.cdp("Emulation.setEmulatedMedia", features=media)
            browser.screenshot(tmp_path / f"submit-{width}-{scheme}.png")
            assert_clean(browser)
    browser.js("document.querySelectorAll('form details').forEach((one) => { one.open = true })")
    assert_clean(browser)
    browser.cdp("Emulation.setEmulatedMedia", features=[])


def test_uploaded_csv_is_previewed_as_the_reader_and_the_template_see_it(page, tmp_path):
    browser = page.open("submit")
    browser.choose("select[name=kind]", "grpo")
    browser.upload("input[name=upload]", sums(tmp_path))
    browser.wait_for("40 records")
    browser.wait_for("sums.csv")
    assert "0 + 1 = ?" in browser.js("return document.querySelector('.records').innerText")
    fill(browser, template="Q: {question}\nA:")
    prompt = "document.querySelector('.preview pre')?.textContent"
    browser.wait(f"{prompt} === 'Q: 0 + 1 = ?\\nA:'")
    assert " tokens of the " in browser.text()
    browser.wait(f"{COMMAND}?.includes('--eval-samples 4')")  # one in ten


def test_what_is_in_a_file_is_text_and_what_is_wrong_with_it_has_no_path(page, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"prompt": HOSTILE, "completion": "1"}) + "\nno JSON\n")
    browser = page.open("submit")
    browser.choose("select[name=kind]", "sft")
    browser.upload("input[name=upload]", path)
    browser.wait_for("2 records")
    browser.wait_for("data: bad.jsonl, line 2")
    assert HOSTILE in browser.js("return document.querySelector('.records').innerText")
    assert "/files/" not in browser.text()
    assert browser.js("return window.hacked") is None


def test_rewards_are_chosen_with_their_weights(page):
    browser = page.open("submit")
    browser.choose("select[name=kind]", "grpo")
    browser.click("input[name=reward-math]")
    browser.type("input[name=weight-math]", "0.2")
    browser.wait(f"{COMMAND}?.includes('--reward math=0.2')")
    browser.click("input[name=reward-math]")
    browser.click("input[name=reward-correctness]")
    browser.wait(f"{SUBMIT}.disabled")
    browser.click("input[name=reward-custom]")
    fill(browser, custom_min_length="3")
    browser.wait(f"{COMMAND}?.includes('--custom-min-length 3')")


def test_a_sweep_is_submitted_from_the_form(page, daemon):
    browser = page.open("submit")
    browser.choose("select[name=kind]", "grpo")
    browser.click("input[name=evaluate]")
    fill(browser, num_generations="2", max_completion_length="4", samples="4", name="rates")
    fill(browser, template="{question}=")
    browser.wait_for("4 steps.")
    browser.press_summary("Sweep several jobs that differ in options or seeds")
    browser.press("Vary an option")
    browser.choose("select[name=sweep_option]", "learning_rate")
    fill(browser, sweep_values="1e-5, fast")
    browser.wait_for("learning rate: must be a number")
    fill(browser, sweep_values="1e-5, 1e-4", sweep_halving="3")
    browser.wait_for("halving: must be at most the number of points (2), got 3")
    fill(browser, sweep_halving="2", sweep_seeds="2")
    browser.wait_for("4 jobs, 12 steps in all, compared at steps 2, 4, by reward.")
    command = browser.wait(COMMAND)
    assert command.endswith(
        " --sweep learning_rate=0.00001,0.0001 --seeds 2 --halving 2 --name rates"
    )
    assert "--learning-rate" not in command
    for width in WIDTHS:
        browser.resize(width)
        assert_clean(browser)
    browser.press("Submit")
    browser.wait("location.hash.startsWith('#/sweeps/sweep-')")
    sweep_id = browser.js("return location.hash").split("/")[2]
    browser.wait("document.querySelector('.card .status.finished') !== null", timeout_s=120)
    found = daemon.client.groups.sweep(sweep_id)
    assert (found["name"], found["jobs"], found["halving"]) == ("rates", 4, 2)
    assert [point["values"] for point in found["points"]] == [
        {"learning_rate": 1e-5},
        {"learning_rate": 1e-4},
    ]
    assert browser.problems() == []


def test_an_earlier_job_is_submitted_again_with_its_options(page, daemon):
    job_id = daemon.client.jobs.submit(spec_class("grpo").parse(OPTIONS))
    browser = page.open(f"submit?job={job_id}")
    browser.wait(f"{SUBMIT}.disabled === false")
    assert browser.js("return document.querySelector('[name=num_generations]').value") == "2"
    browser.press("Submit")
    browser.wait("location.hash.startsWith('#/jobs/')")
    wait_until(lambda: job_id not in browser.js("return location.hash"))
