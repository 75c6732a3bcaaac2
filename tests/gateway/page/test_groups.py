"""Sweeps and curricula in the dashboard, in a real browser with a real daemon."""

from __future__ import annotations

import pytest
from daemons import Daemon
from dashboard import OPTIONS, STEPS, WIDTHS, assert_clean
from waiting import wait_until

pytestmark = pytest.mark.nightly(
    part="page", catches="sweeps and curricula that the page shows or steers wrongly"
)

STAGES = {
    "stages": [{"name": "first", "learning_rate": 1e-6}, {"name": "second", "gate": False}],
    "gate": {"samples": 8, "most_samples": 8, "max_tokens": 4},
}


@pytest.fixture(scope="module")
def groups(daemon: Daemon) -> tuple[str, str]:
    """A finished sweep and a finished curriculum."""
    sweep_id = daemon.client.groups.submit_sweep(
        "grpo",
        {**OPTIONS, "eval_samples": 4},
        {"sweep": {"learning_rate": ["1e-5", "1e-4"]}, "seeds": 2},
    )
    curriculum_id = daemon.client.groups.submit_curriculum("grpo", OPTIONS, STAGES)
    client = daemon.client
    wait_until(lambda: client.groups.sweep(sweep_id)["status"] == "finished", timeout_s=120)
    wait_until(
        lambda: client.groups.curriculum(curriculum_id)["status"] == "finished", timeout_s=120
    )
    return sweep_id, curriculum_id


WIDER = pytest.mark.nightly(
    part="clients", catches="a view of sweeps that does not fit a wide screen"
)


@pytest.mark.parametrize("width", [WIDTHS[0], *(pytest.param(w, marks=WIDER) for w in WIDTHS[1:])])
def test_sweeps_and_curricula_are_accessible_and_fit_the_screen(page, groups, tmp_path, width):
    sweep_id, curriculum_id = groups
    views = {
        "sweeps": ("sweeps", sweep_id),
        "sweep": (f"sweeps/{sweep_id}", "best"),
        "curricula": ("curricula", curriculum_id),
        "curriculum": (f"curricula/{curriculum_id}", "undecided"),
    }
    page.browser.resize(width)
    for name, (view, text) in views.items():
        browser = page.open(view)
        browser.wait_for(text)
        browser.screenshot(tmp_path / f"{name}-{width}.png")
        assert_clean(browser)


def test_a_sweep_is_followed_steered_and_removed(page, daemon):
    given = {"sweep": {"learning_rate": ["1e-5", "1e-4"]}}
    values = {**OPTIONS, "samples": 40, "epochs": STEPS // 40}
    sweep_id = daemon.client.groups.submit_sweep("grpo", values, given)
    browser = page.open()
    browser.wait_for("Sweeps and curricula")
    browser.open(f"{page.url}/#/sweeps/{sweep_id}")
    step = "Number(document.querySelector('.card .progress .count')?.innerText.split('/')[0])"
    first = browser.wait(step, timeout_s=60)
    browser.wait(f"{step} > arguments[0]", first)
    browser.press(f"Cancel {sweep_id}")
    browser.wait_for("Running jobs save a checkpoint and stop")
    browser.press("Cancel all")
    browser.press(f"Remove {sweep_id}")
    browser.wait_for("This cannot be undone.")
    browser.press("Remove all")
    browser.wait("location.hash === '#/sweeps'")
    wait_until(lambda: sweep_id not in browser.text())
    assert not (daemon.home.sweeps / sweep_id).exists()


def test_a_curriculum_is_followed_from_stage_to_stage(page, daemon):
    curriculum_id = daemon.client.groups.submit_curriculum("grpo", OPTIONS, STAGES)
    browser = page.open(f"curricula/{curriculum_id}")
    browser.wait_for("evaluating on 8 questions", timeout_s=90)
    browser.wait("document.querySelector('.card .status.finished') !== null", timeout_s=90)
    rows = browser.js("return [...document.querySelectorAll('tbody tr')].map((r) => r.innerText)")
    assert len(rows) == 2
    assert "continue" in rows[0]
    assert "undecided" in rows[0]
    last = daemon.client.groups.curriculum(curriculum_id)["attempts"][-1]["job"]
    browser.open(f"{page.url}/#/jobs/{last}")
    browser.wait_for(curriculum_id)
    assert browser.problems() == []
