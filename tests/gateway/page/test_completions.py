"""Completions and episodes on the dashboard: by prompt, sorted, filtered, searched, compared."""

from __future__ import annotations

from typing import Any

import pytest
from browser import Browser
from daemons import Daemon
from dashboard import HOSTILE, WIDTHS, assert_clean, finished

from warmd.jobs.grpo.completions import FILE, Completions

pytestmark = pytest.mark.nightly(
    part="page", catches="completions that the page cuts, mixes up or takes for markup"
)

SCHEMES = ("light", "dark")
LONG = "It is because " + "of this and " * 200 + "so it is forty-two."
MEMBERS = "[...document.querySelectorAll('.member')].map((one) => one.innerText)"
STATUS = "document.querySelector('main [role=status]')?.innerText"


def row(step: int, number: int, completion: str, reward: float, **fields: Any) -> dict[str, Any]:
    """A completion of the prompt in a row of the data, as the trainer keeps it."""
    return {
        **{
            "row": number,
            "group": number,
            "prompt": f"Question {number}?",
            "completion": completion,
        },
        **{"answer": "42", "reward": reward, "rewards": {"right": reward, "polite": 0.5}},
        **{"advantage": 2 * reward - 1, "tokens": step, "stop": "end", "replayed": False},
        **fields,
    }


@pytest.fixture(scope="module")
def run(daemon: Daemon) -> str:
    """A finished job with completions of three steps: long and hostile ones, and episodes."""
    job_id = finished(daemon)
    turns = [
        {"role": "assistant", "content": "go left", "reward": 0.0},
        {"role": "environment", "content": f"a wall {HOSTILE}"},
        {"role": "assistant", "content": "go right", "reward": 1.0},
    ]
    file = Completions(daemon.client.rundir(job_id).path / FILE, every=1, step=0)
    file.add(10, [row(10, 1, "I say 41", 0.0), row(10, 1, "I say 42", 1.0)])
    file.add(20, [row(20, 1, "I think 42", 1.0), row(20, 1, "I think 7", 0.0)])
    file.add(
        30,
        [
            *(row(30, 2, LONG, 1.0), row(30, 2, HOSTILE, 0.0, stop="length")),
            *(row(30, 3, "the same", 0.5) for _ in range(4)),
            row(30, 4, "", 1.0, turns=turns, stop="terminated", success=True),
        ],
    )
    file.close()
    return job_id


def opened(page: Any, run: str, query: str = "") -> Browser:
    browser: Browser = page.open(f"jobs/{run}/completions{query}")
    browser.wait("document.querySelector('.member') !== null")
    return browser


def test_the_members_of_a_group_are_side_by_side_with_rewards_by_name(page, run):
    browser = opened(page, run)
    assert browser.js(f"return {STATUS}").startswith("Step 30: 7 completions of 3 prompts")
    members = browser.js(f"return {MEMBERS}")
    assert "advantage +1" in members[0]
    assert "right 1" in members[0]
    assert "polite 0.5" in members[0]
    assert "advantage -1" in members[1]
    assert "cut at the length" in members[1]
    assert "4 alike" in members[2]
    colors = [
        name.split()[-1]
        for name in browser.js(
            "return [...document.querySelectorAll('.member')].map((one) => one.className)"
        )
    ]
    assert colors == ["above", "below", "even", "above"]


def test_a_long_completion_is_folded_and_shown_whole(page, run):
    browser = opened(page, run)
    assert "forty-two" not in browser.text()
    browser.press(f"All {len(LONG):,} characters")
    browser.wait_for("so it is forty-two.")
    browser.press("Fold")
    assert "forty-two" not in browser.text()


def test_texts_of_models_are_text_also_where_they_are_found(page, run):
    browser = opened(page, run)
    browser.type("input[name=words]", "onerror")
    browser.wait(f"{STATUS}.startsWith('Step 30: 1 of 7')")
    assert browser.js("return document.querySelector('.member mark').innerText") == "onerror"
    assert HOSTILE in browser.js("return document.querySelector('.member').innerText")
    assert browser.js("return window.hacked") is None
    assert browser.js("return document.querySelectorAll('main img, main script').length") == 0


def test_completions_are_filtered_by_reward_and_sorted(page, run):
    browser = opened(page, run)
    browser.type("input[name=least]", "0.6")
    browser.wait(f"{STATUS}.startsWith('Step 30: 2 of 7')")
    browser.type("input[name=least]", "0")
    browser.choose("select[name=order]", "worst")
    browser.wait("document.querySelector('table.completions') !== null")
    rewards = (
        "[...document.querySelectorAll('td.member strong')].map((one) => Number(one.innerText))"
    )
    assert browser.js(f"return {rewards}") == [0, 0.5, 0.5, 0.5, 0.5, 1, 1]
    browser.choose("select[name=order]", "best")
    browser.wait(f"{rewards}[0] === 1")


def test_any_step_is_reached_and_an_address_shows_the_same_again(page, run):
    browser = opened(page, run)
    browser.press("Earlier step")
    browser.wait(f"{STATUS}.startsWith('Step 20:')")
    browser.choose("select[name=step]", "10")
    browser.wait(f"{STATUS}.startsWith('Step 10:')")
    address = browser.js("return location.hash.slice(2)")
    page.open(address)
    browser.wait(f"{STATUS}.startsWith('Step 10:')")
    assert "I say 41" in browser.text()


def test_a_prompt_is_followed_over_time_and_a_text_is_found_in_all_steps(page, run):
    browser = opened(page, run, "?step=20")
    browser.click("a[href$='row=1']")
    browser.wait(f"{STATUS}.startsWith('Row 1 of the data')")
    texts = "[...document.querySelectorAll('.member pre')].map((one) => one.innerText)"
    assert browser.js(f"return {texts}") == ["I say 41", "I say 42", "I think 42", "I think 7"]
    browser.type("input[name=words]", "42")
    browser.press("Search all steps")
    browser.wait(f"{STATUS}.startsWith('“42” in all steps')")
    assert browser.js(f"return {texts}") == ["I say 42", "I think 42"]


def test_a_prompt_is_compared_with_the_step_before(page, run):
    browser = opened(page, run, "?step=20")
    browser.press("Compare with the step before")
    browser.wait_for("Step 10 (mean reward 0.5) and Step 20")
    marks = "[...document.querySelectorAll('.pairs mark')].map((one) => one.innerText)"
    assert browser.js(f"return {marks}") == ["say", "think", "say", "41", "think", "7"]
    browser = opened(page, run, "?step=10")
    browser.press("Compare with the step before")
    browser.wait_for("No earlier step that is kept has this prompt.")


def test_an_episode_has_its_turns_with_observations_dimmed(page, run):
    browser = opened(page, run)
    turns = browser.js(
        "return [...document.querySelectorAll('.turns li')]"
        ".map((one) => one.innerText.split('\\n')[0])"
    )
    assert turns == ["policy", "environment", "policy"]
    color = "getComputedStyle(document.querySelector('.turns .{} pre')).color"
    assert browser.js(f"return {color.format('policy')} !== {color.format('observation')}")
    assert "terminated, success" in browser.js(f"return {MEMBERS}")[-1]
    assert browser.js("return window.hacked") is None


@pytest.mark.parametrize("width", WIDTHS)
def test_completions_are_accessible_and_fit_the_screen_in_both_schemes(page, run, tmp_path, width):
    page.browser.resize(width)
    try:
        for scheme in SCHEMES:
            media = [{"name": "prefers-color-scheme", "value": scheme}]
            page.browser.cdp("Emulation.setEmulatedMedia", features=media)
            browser = opened(page, run)
            browser.screenshot(tmp_path / f"completions-{width}-{scheme}.png")
            assert_clean(browser)
            browser.choose("select[name=order]", "worst")
            browser.wait("document.querySelector('table.completions') !== null")
            assert_clean(browser)
            browser = opened(page, run, "?step=20")
            browser.press("Compare with the step before")
            browser.wait("document.querySelector('.pairs') !== null")
            assert_clean(browser)
    finally:
        page.browser.cdp("Emulation.setEmulatedMedia", features=[])
