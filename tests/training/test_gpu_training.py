"""Training as it is on a GPU, computed on a CPU: in bfloat16, and with deterministic algorithms."""

from __future__ import annotations

from typing import Any

import mlm_jobs
import pytest
import tiny
import torch
from breadth import mostly_slow

from warmd.jobs.grpo.kind import run as run_grpo
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.grpo.sampler import Sampler
from warmd.jobs.grpo.step import Reinforcement
from warmd.jobs.mlm.kind import run as run_mlm
from warmd.jobs.training import arguments, determinism, device_copies
from warmd.jobs.training.determinism import algorithms
from warmd.jobs.training.device_copies import HostReader, held
from warmd.jobs.training.loop import Training
from warmd.jobs.training.provenance import differences

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


@pytest.fixture
def has_bfloat16(monkeypatch):
    """Let the arguments of the Trainer be those of a GPU."""
    monkeypatch.setattr(arguments, "has_bfloat16", lambda device: True)


@pytest.mark.parametrize(
    "options", mostly_slow([{}, {"beta": 0.1}, {"num_iterations": 2}], but=[{"beta": 0.1}])
)
def test_grpo_trains_in_bfloat16_(tmp_path, has_bfloat16, options):
    job = tiny.surroundings(tmp_path)
    spec = GrpoSpec(samples=4, num_generations=4, max_completion_length=8, **options)
    assert run_grpo(spec, job.ctx)["steps"] == 4 * spec.num_iterations


@pytest.mark.parametrize(
    "architecture", mostly_slow(["bert", "modernbert", "distilbert"], but=["bert"])
)
def test_mlm_evaluates_in_bfloat16_before_its_first_step_as_after_it(
    tmp_path, has_bfloat16, architecture
):
    home = mlm_jobs.make_home(tmp_path)
    job = tiny.surroundings(home / "runs" / "j1")
    # A learning rate that changes no weight.
    spec = mlm_jobs.text_spec(
        home, architecture, eval_first=True, steps=2, eval_every=1, learning_rate=1e-30
    )
    run_mlm(spec, job.ctx)
    losses = {event["mlm_loss"] for event in job.of_type("eval")}
    assert len(losses) == 1


@pytest.mark.slow
def test_the_learning_part_of_a_step_is_deterministic_and_the_generation_is_not(
    tmp_path, monkeypatch
):
    """Generation sums floats cumulatively, for which torch raises on a GPU."""
    monkeypatch.setattr(
        Training, "_is_deterministic", property(lambda self: self.spec.deterministic)
    )
    seen: list[tuple[str, bool]] = []

    def recording(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def record(self: Any, *args: Any) -> Any:
            seen.append((name, torch.are_deterministic_algorithms_enabled()))
            return original(self, *args)

        monkeypatch.setattr(kind, name, record)

    recording(Sampler, "sample")
    recording(Reinforcement, "_reported")
    spec = GrpoSpec(samples=1, num_generations=4, max_completion_length=4)
    run_grpo(spec, tiny.surroundings(tmp_path / "on").ctx)
    run_grpo(
        GrpoSpec.parse({**spec.to_json(), "deterministic": False}),
        tiny.surroundings(tmp_path / "off").ctx,
    )
    assert seen == [
        ("sample", False),
        ("_reported", True),
        ("sample", False),
        ("_reported", False),
    ]
    assert not torch.are_deterministic_algorithms_enabled()


def test_deterministic_algorithms_end_with_their_block():
    fills = determinism.settings.fill_uninitialized_memory
    with pytest.raises(ZeroDivisionError), algorithms(deterministic=True):
        _ = 1 // (not torch.are_deterministic_algorithms_enabled())
    assert not torch.are_deterministic_algorithms_enabled()
    assert determinism.settings.fill_uninitialized_memory == fills


def test_another_driver_or_cuda_version_is_reported_on_resume():
    then = {
        "versions": {},
        "threads": 1,
        "device": "NVIDIA H200",
        "driver": "570.1",
        "cuda": "13.0",
    }
    assert differences(then, {**then, "driver": "580.2"}) == ["driver 570.1, now 580.2"]
    assert differences(then, then) == []
    of_cpu = {"versions": {}, "threads": 1, "device": "AMD EPYC"}  # as in earlier checkpoints
    assert differences(of_cpu, of_cpu) == []


def test_tensors_of_a_device_are_read_piece_by_piece_as_they_were_when_they_were_held(monkeypatch):
    monkeypatch.setattr(device_copies, "_PIECE_BYTES", 64)
    reader = HostReader(torch.device("cpu"))
    for tensor in (torch.randn(37), torch.randn(5, 6).t(), torch.tensor(3.0), torch.randn(0, 4)):
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(reader.read(tensor.to(dtype)), tensor.to(dtype))


@pytest.mark.parametrize(("free", "place"), [(2**40, "meta"), (10, "cpu")])
def test_copies_for_a_checkpoint_are_made_on_the_device_where_it_has_room(monkeypatch, free, place):
    monkeypatch.setattr(device_copies, "free_bytes", lambda device: free)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: torch.zeros(self.shape))  # not of meta
    weight, count = torch.randn(3, device="meta"), torch.ones(1)
    state = held({"state": {0: {"moment": weight, "step": count}}, "lr": 0.1})
    copy = state["state"][0]["moment"]
    assert copy.device.type == place
    assert copy is not weight
    assert state["state"][0]["step"] is count  # of the CPU: written from where it is
