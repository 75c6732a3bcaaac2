"""A training job apart from its steps: pauses, saves by time, divergence."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from mlm_jobs import make_home, text_spec
from transformers import AutoModelForMaskedLM, BertForMaskedLM, Trainer
from waiting import wait_until

from warmd.jobs.context import Context
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.mlm.kind import run
from warmd.jobs.mlm.options import MlmSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


def spec(home: Path, **options: Any) -> MlmSpec:
    quick: dict[str, Any] = {
        "learning_rate": 1e-3,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "gradient_accumulation": 1,
        "validation": 0.05,
        "eval_every": 0,
        "save_every": 100,
    }
    return text_spec(home, **(quick | options))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForMaskedLM.from_pretrained(folder).state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class Pausable(tiny.Surroundings):
    """A Context in which the job is paused at a step until the test continues it."""

    def __init__(self, folder: Path, at_step: int) -> None:
        super().__init__(folder, None)
        self.paused = threading.Event()
        pause = threading.Event()
        self.pause = pause
        self.at_step = at_step
        self.ctx = Context(**{**vars(self.ctx), "pause": pause})

    def emit(self, type: str, /, *, step: int | None = None, **fields: Any) -> None:
        super().emit(type, step=step, **fields)
        if type == "step" and step == self.at_step:
            self.pause.set()
        if type == "paused":
            self.paused.set()


def in_background(
    job: MlmSpec, surroundings: tiny.Surroundings
) -> tuple[threading.Thread, list[Any]]:
    ended: list[Any] = []

    def work() -> None:
        torch.set_num_threads(1)
        try:
            ended.append(run(job, surroundings.ctx))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, ended


def test_a_paused_job_keeps_its_state_and_continues(home):
    job = spec(home)
    straight = tiny.surroundings(home / "runs" / "straight")
    run(job, straight.ctx)
    paused = Pausable(home / "runs" / "paused", at_step=5)
    thread, ended = in_background(job, paused)
    assert paused.paused.wait(60)
    assert paused.last_step == 5
    # A laptop may die meanwhile.
    wait_until(lambda: [event["step"] for event in paused.of_type("checkpoint")] == [5])
    assert thread.is_alive()
    paused.pause.clear()
    thread.join(60)
    assert ended[0]["steps"] == 12
    assert paused.of_type("unpaused")[0]["step"] == 5
    found = [weights(home / "runs" / name / "model") for name in ("straight", "paused")]
    assert same(*found)


def test_a_paused_job_that_is_stopped_saves_and_stops_at_once(home):
    job = spec(home)
    paused = Pausable(home / "runs" / "stopped", at_step=5)
    thread, ended = in_background(job, paused)
    assert paused.paused.wait(60)
    paused.stop.set()
    thread.join(60)
    assert isinstance(ended[0], Stopped)
    assert paused.last_step == 5
    latest = paused.ctx.checkpoints.latest()
    assert latest is not None
    assert latest.name == "checkpoint-5"
    again = tiny.surroundings(home / "runs" / "stopped")
    run(job, again.ctx)
    assert again.of_type("step")[0]["step"] == 6


@pytest.mark.slow
def test_checkpoints_can_be_minutes_apart(home, tmp_path):
    # 0.001 minutes, 60 ms: far fewer than steps, and more than the last one.
    seldom = tiny.surroundings(home / "runs" / "seldom")
    run(spec(home, save_every="60m"), seldom.ctx)
    assert [event["step"] for event in seldom.of_type("checkpoint")] == [12]
    often = tiny.surroundings(home / "runs" / "often")
    run(spec(home, save_every="0.001m", steps=40), often.ctx)
    assert 2 <= len(often.of_type("checkpoint")) < 40


@pytest.mark.slow
def test_a_diverging_loss_is_reported_and_can_stop_the_job(home):
    name = home / "runs" / "runaway"
    run(spec(home, steps=20), tiny.surroundings(name).ctx)
    wild = spec(home, steps=40, learning_rate=1.0)
    continuing = tiny.surroundings(name)
    run(wild, continuing.ctx)
    [event] = continuing.of_type("divergence")[:1]
    assert event["metric"] == "loss"
    assert event["value"] > 3 * event["median"] > 0
    assert event["step"] > 20, "the losses before the resume are remembered"

    name = home / "runs" / "runaway that stops"
    run(spec(home, steps=20), tiny.surroundings(name).ctx)
    stops = tiny.surroundings(name)
    with pytest.raises(JobFailed, match=r"^step \d+: loss is [\d.e+]+, more than three times"):
        run(spec(home, steps=40, learning_rate=1.0, on_divergence="stop"), stops.ctx)
    diverged_at = stops.of_type("divergence")[0]["step"]
    latest = stops.ctx.checkpoints.latest()
    assert latest is not None
    assert int(latest.name.removeprefix("checkpoint-")) < diverged_at


def test_a_plain_trainer_resumes_from_a_checkpoint(home, tmp_path):
    from transformers import TrainingArguments

    job = spec(home, steps=6, save_every=3)
    whole = tiny.surroundings(home / "runs" / "for a plain one")
    run(job, whole.ctx)
    folder = home / "runs" / "for a plain one" / "checkpoints" / "checkpoint-3"
    model = BertForMaskedLM.from_pretrained(folder)
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]} for _ in range(12)]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            learning_rate=1e-3,
        ),
        train_dataset=rows,
    )
    trainer.train(resume_from_checkpoint=str(folder))
    assert trainer.state.global_step == 6
    moments = trainer.optimizer.state_dict()["state"][0]  # type: ignore[union-attr]
    assert int(moments["step"]) == 6, "the optimizer was not a fresh one"


def test_a_metric_that_does_not_exist_is_refused(home):
    with pytest.raises(SpecError, match=r"^keep_best: must be one of loss, .*, got 'reward'$"):
        spec(home, keep_best="reward")
    with pytest.raises(SpecError, match=r"^keep_best: must go with eval_every above 0, got mlm_"):
        spec(home, keep_best="mlm_acc", eval_every=0)
