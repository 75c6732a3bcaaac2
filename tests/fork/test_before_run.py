"""A horse's check of the number of processes before a job."""

from __future__ import annotations

import pytest

from warmd.configs.values import num_cores
from warmd.daemon.fork.before_run import check_processes
from warmd.daemon.fork.placement import Placement
from warmd.daemon.host.messages import RunJob
from warmd.jobs.errors import JobFailed


@pytest.mark.parametrize(
    ("isolation", "device", "processes", "message"),
    [
        ("fork", "cpu", 1, None),
        ("fork", "cpu", num_cores(), None),
        (
            "fork",
            "cpu",
            num_cores() + 1,
            f"at most {num_cores()} (the cores of this machine), got {num_cores() + 1}",
        ),
        ("resident", "cpu", 2, "1 (its worker has isolation=resident), got 2"),
        ("fork", "cuda:0", 2, "1 (the job computes on a GPU, cuda:0), got 2"),
    ],
    ids=["one", "a core each", "too many", "resident", "GPU"],
)
def test_a_job_of_several_processes_needs_a_core_each_and_a_horse_of_its_own(
    isolation, device, processes, message
):
    request = RunJob("j", "w", "", 1, 1, None, 0, None, isolation=isolation)
    if message is None:
        check_processes(processes, request, Placement(device))
        return
    with pytest.raises(JobFailed) as refused:
        check_processes(processes, request, Placement(device))
    assert str(refused.value) == f"processes: must be {message}"
