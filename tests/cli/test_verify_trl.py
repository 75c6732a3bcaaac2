"""`warmd checkpoints verify --trl`: a job's first steps by TRL's trainers and by warmd's loop."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import dpo_jobs
import psutil
import pytest
import sft_jobs
import tiny
import torch
from desks import Desk
from shell import Done
from trl.trainer.sft_trainer import SFTTrainer
from waiting import wait_until

from warmd.daemon.reports import verify_trl
from warmd.jobs.files.atomic import scratch_folder
from warmd.jobs.sft.kind import run
from warmd.jobs.training import loop, optimizer
from warmd.jobs.verify_trl import rows
from warmd.jobs.verify_trl.compare import Rounding, Side, Step, compare
from warmd.jobs.verify_trl.training import verify

SUPPORT = Path(tiny.__file__).parent
GAMES = Path(__file__).parents[1] / "environments"


def submitted(desk: Desk, model: Path, kind: str, *options: str) -> str:
    """Submit a job of a kind on the tiny model; no worker takes it."""
    folder = desk.home.path.parent
    prompts = [{"prompt": f"{n} and {n}", "answer": str(folder)} for n in range(20)]
    if "--environment" in options:
        data = ["--samples", "12", "--num-generations", "4", "--max-turn-length", "6"]
        data += [word for letter in "abcdefghijklmnop" for word in ("--stop", letter)]
    elif kind == "grpo":
        data = ["--dataset", sft_jobs.write(folder / "rows.jsonl", prompts), "--samples", "12"]
        data += ["--num-generations", "4", "--max-completion-length", "6"]
        data += [] if "--reward" in options else ["--reward", "behaviours:length"]
    else:
        known = sft_jobs.ROWS["prompt and completion"] if kind == "sft" else dpo_jobs.ROWS["texts"]
        data = [sft_jobs.write(folder / "rows.jsonl", known), "--batch-size", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(GAMES if "--environment" in options else SUPPORT)  # the module that it names
        done = desk.warmd("submit", kind, *data, "--model", str(model), *options)
    assert done.code == 0, done.err
    return done.out.strip()


def scratch(desk: Desk) -> list[Path]:
    """The folders of comparisons, and their locks."""
    return list(desk.home.cache.glob(".*scratch-*"))


def verified(desk: Desk, job_id: str, *options: str) -> Done:
    return desk.warmd("checkpoints", "verify", job_id, "--trl", *options)


@pytest.mark.nightly(part="oracles", catches="a kind of job that verify cannot compare with TRL")
@pytest.mark.parametrize(
    ("kind", "options", "changed"),
    [  # dpo: below, in a table
        pytest.param("sft", ["--gradient-accumulation", "2", "--lora", "4"], [], id="sft"),
        pytest.param(
            "grpo",
            [
                *("--beta", "0.1", "--prompts-per-step", "2", "--resample", "2"),
                # A loss that depends on which completions are in one micro-batch.
                *("--loss-type", "bnpo", "--batch-size", "2"),
            ],
            ["resample: 0 on both sides, not 2"],
            id="grpo",
        ),
        pytest.param(
            "grpo",
            [
                *("--environment", "games:Digits", "--beta", "0.1", "--prompts-per-step", "2"),
                *("--mask-truncated-completions", "--batch-size", "2"),
            ],
            ["mask_truncated_completions: False on both sides, not True"],
            id="episodes",
        ),
    ],
)
def test_a_job_of_each_kind_equals_stock_trl(desk, tiny_model, kind, options, changed):
    job_id = submitted(desk, tiny_model, kind, *options)
    desk.client.rundir(job_id).annotate(rules=0)  # as of an earlier version
    before = {path for path in desk.home.path.rglob("*") if "redis" not in str(path)}
    done = verified(desk, job_id, "--json")
    assert done.code == 0, done.out + done.err
    [verdict] = done.objects
    assert verdict["equal"] is True
    assert verdict["changed"] == changed
    assert (verdict["id"], verdict["kind"]) == (job_id, kind)
    assert [step["step"] for step in verdict["steps"]] == [1, 2, 3]
    for step in verdict["steps"]:
        assert step["warmd"]["loss"] == pytest.approx(step["trl"]["loss"], rel=1e-5, abs=1e-6)
        assert step["warmd"]["grad_norm"] == pytest.approx(step["trl"]["grad_norm"], rel=1e-4)
    assert verdict["weights"]["largest_change"] > 0
    assert verdict["weights"]["relative"] < 1e-2
    assert "warmd: step 1 of 3\n" in done.err
    assert "TRL: step 3 of 3\n" in done.err
    after = {path for path in desk.home.path.rglob("*") if "redis" not in str(path)}
    # The tokens of its records are those that the job will use.
    assert all("cache" in path.parts for path in after - before)
    assert not scratch(desk)


@pytest.mark.slow
def test_the_sides_are_shown_in_a_table_with_a_verdict_also_without_a_daemon(desk, tiny_model):
    job_id = submitted(desk, tiny_model, "dpo", "--batch-size=8", "--processes=2", "--epochs=3")
    desk.server.stop()
    done = verified(desk, job_id, "--steps", "20")
    assert done.code == 0, done.out + done.err
    assert done.err.endswith(
        "processes: 1 on both sides, not 2\nsteps: 2, one pass over the data\n"
    )
    lines = done.out.splitlines()
    headers = ["STEP", "LOSS TRL", "LOSS WARMD", "GRAD NORM TRL", "GRAD NORM WARMD"]
    assert [word.strip() for word in lines[0].split("  ") if word] == headers
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert lines[3].startswith("largest difference of a weight: ")
    assert lines[3].endswith("; beyond rounding: 0 of 5,984 weights")
    assert lines[4].startswith(f"{job_id}: 2 steps of TRL ")
    assert lines[4].endswith(" and warmd are equal within rounding")
    assert len(lines) == 5


def test_jobs_without_a_trainer_in_trl_are_refused(desk, tiny_model, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("def double(number):\n    return 2 * number\n")
    done = desk.warmd("submit", "mlm", "--data", str(tmp_path / "code"), "--steps", "2")
    assert done.code == 0, done.err
    refusal = verified(desk, done.out.strip())
    assert refusal.is_refusal(2)
    assert refusal.err == (
        "Error: job: must be of kind sft, dpo or grpo with --trl, got mlm: TRL has no trainer for "
        "masked language models\n"
    )


def test_options_of_the_two_checks_are_not_mixed(desk, tiny_model):
    job_id = submitted(desk, tiny_model, "sft")
    refusal = verified(desk, job_id, "--step", "2")
    assert refusal.is_refusal(2)
    assert "step: must not go with trl" in refusal.err
    refusal = desk.warmd("checkpoints", "verify", job_id, "--steps", "2")
    assert refusal.is_refusal(2)
    assert "steps: must go with trl" in refusal.err


def verifies(process: psutil.Process) -> bool:
    """Whether it is a process of the comparison, and no zombie."""
    with suppress(psutil.Error):
        return "warmd.daemon.fork.verify_trl" in process.cmdline()
    return False


@pytest.mark.nightly(
    part="oracles", catches="a side of a comparison that hides why it failed, or outlives it"
)
def test_a_failing_side_fails_with_its_reason_and_an_interrupted_one_ends(desk, tiny_model):
    job_id = submitted(desk, tiny_model, "grpo", "--reward", "behaviours:raises")
    (desk.home.path.parent / "broken").touch()
    done = verified(desk, job_id)
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("Error: verify --trl: reward behaviours:raises")

    def interrupt(words: str) -> None:
        if words.startswith("importing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify_trl.verify(desk.client, job_id, steps=1, report=interrupt)
    assert not scratch(desk)
    assert not [child for child in psutil.Process().children(recursive=True) if verifies(child)]


@pytest.mark.slow
def test_a_killed_comparison_leaves_nothing_to_the_next(desk, tiny_model):
    job_id = submitted(desk, tiny_model, "grpo")
    command = [sys.executable, "-m", "warmd.cli", "checkpoints", "verify", job_id, "--trl"]
    with subprocess.Popen(command, env=desk.environ, stderr=subprocess.PIPE, text=True) as killed:
        assert killed.stderr is not None
        for line in killed.stderr:
            if line.startswith("importing"):
                break
        [side] = [one for one in psutil.Process(killed.pid).children() if verifies(one)]
        killed.kill()
    assert scratch(desk)
    wait_until(lambda: not verifies(side))
    with scratch_folder(desk.home.cache) as folder:
        assert folder.name in {path.name for path in scratch(desk)}
        assert len(scratch(desk)) == 2  # with its lock
    assert not scratch(desk)


# Both sides in this process.


def sides(folder: Path, model: Any, **options: Any) -> dict[str, Any]:
    """Compare three steps of an SFT job on a tiny model, in this process."""
    warm = tiny.Models(model)
    scratch = folder / "home" / "cache" / "verify"
    scratch.mkdir(parents=True)

    def read() -> Any:
        found = warm.take("demo")
        return type(found)(**{**vars(found), "model": tiny.model(dropout=0.0)})

    return verify(
        sft_jobs.spec(folder, **options),
        read,
        job_id="sft-20261121-184200-x7f2",
        scratch=scratch,
        rules=2,
        code_folders=(),
        steps=3,
        report=lambda words: None,
    )


@pytest.mark.usefixtures("like_a_work_horse")
def test_warmds_side_computes_the_steps_of_the_job(tmp_path):
    job = tiny.surroundings(tmp_path / "run")
    run(sft_jobs.spec(tmp_path, batch_size=4, steps=3), job.ctx)
    of_job = [(event["loss"], event["grad_norm"]) for event in job.of_type("step")]
    found = sides(tmp_path, tiny.model(), batch_size=4, steps=3)
    assert found["differences"] == []
    for expected, step in zip(of_job, found["steps"], strict=True):
        own = step["warmd"]
        assert (own["loss"], own["grad_norm"]) == pytest.approx(expected, rel=1e-6)


def other_rate(patch: pytest.MonkeyPatch) -> None:
    in_order = rows._in_order

    def changed(args: Any, stock: Any) -> Any:
        args.learning_rate *= 1.01
        return in_order(args, stock)

    patch.setattr(rows, "_in_order", changed)


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "clip", lambda model, most: optimizer.clip(model, 1e6))


def other_loss(patch: pytest.MonkeyPatch) -> None:
    compute = SFTTrainer.compute_loss

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return 1.002 * compute(self, *args, **kwargs)

    patch.setattr(SFTTrainer, "compute_loss", scaled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (other_rate, {"learning_rate", "weights"}),
        (no_clipping, {"weights"}),
        (other_loss, {"loss", "grad_norm"}),
    ],
)
@pytest.mark.usefixtures("like_a_work_horse")
def test_a_wrong_side_is_found(tmp_path, monkeypatch, change, found):
    change(monkeypatch)
    compared = sides(tmp_path, tiny.model(), batch_size=4, weight_decay=0.1)
    differ = {line.partition(" of ")[0].partition(":")[0] for line in compared["differences"]}
    assert differ >= found


# The comparison.

START = {"a": torch.linspace(-1, 1, 8), "b": torch.ones(4)}
GRADIENTS = {"a": torch.linspace(1, 2, 8), "b": torch.tensor([1.0, 1e-3, 1e-6, 0.0])}


def side(*, loss: float = 1.0, **nudges: float) -> Side:
    """A side after two steps; nudges: of element `a3` and so on."""
    weights = {name: start - 2e-3 for name, start in START.items()}
    for place, nudge in nudges.items():
        weights[place[0]][int(place[1])] += nudge
    return Side([Step(1.0, 2.0, 1e-3), Step(loss, 2.0, 1e-3)], weights)


def compared(ours: Side) -> dict[str, Any]:
    rounding = Rounding()
    rounding.add(GRADIENTS)
    rounding.add({name: 2 * one for name, one in GRADIENTS.items()})
    return compare(START, side(), ours, rounding)


def test_equal_sides_have_no_differences():
    found = compared(side())
    assert found["differences"] == []
    assert found["weights"] == {
        "weights": 12,
        "largest_difference": 0.0,
        "largest_change": pytest.approx(2e-3, rel=1e-3),
        "relative": 0.0,
        "beyond_rounding": 0,
        "first": None,
    }


def test_rounding_is_judged_by_the_gradient_of_a_weight():
    assert compared(side(a3=1e-6, b1=2e-4, b2=2e-3, b3=2e-3))["differences"] == []
    found = compared(side(a3=1e-5))
    assert found["differences"] == ["weights: 1 of 12 beyond rounding, the first in a"]
    assert found["weights"]["relative"] == pytest.approx(5e-3, rel=1e-2)
    assert compared(side(b1=1e-3))["weights"]["first"] == "b"


def test_other_losses_and_nan_are_differences():
    assert compared(side(loss=1.001))["differences"] == ["loss of step 2: 1 and 1.001"]
    assert compared(side(loss=1.00001))["differences"] == []
    assert compared(side(loss=math.nan))["differences"] == ["loss of step 2: 1 and nan"]
    assert compared(side(a0=math.nan))["weights"]["beyond_rounding"] == 1
