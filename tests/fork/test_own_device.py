"""The device of a horse: the GPU that it sees, and the fallback if that GPU cannot be used."""

from __future__ import annotations

import json

import pytest
from cuda_children import child

from warmd.configs.gpus import visible_devices
from warmd.daemon.fork.before_run import check_device
from warmd.daemon.fork.placement import Placement
from warmd.daemon.host.messages import RunJob
from warmd.daemon.runs.events import EventLog, read
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs.errors import JobFailed

# Forks a horse for each device, of a GPU that works and of one whose driver is too old.
CHOOSE = """
import json, os
import fake_cuda, torch, transformers
from warmd.daemon.fork import cuda_guard
from warmd.daemon.fork.own_device import own_device
cuda_guard.forbid_cuda()
transformers.utils.is_torch_cuda_available()  # as an import in the zygote does
for wanted, works in (("auto", True), ("auto", False), ("cuda:0", False), ("cpu", True)):
    pid = os.fork()
    if pid == 0:
        if works:
            torch.ones = lambda *_, device: None
            torch.cuda.set_per_process_memory_fraction = lambda *share: print(share, flush=True)
        own = own_device(wanted, 0.4)
        trainer_sees = transformers.utils.is_torch_cuda_available()
        cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        print(json.dumps([own.name, own.problem, trainer_sees, cudnn]), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize(
    ("wanted", "visible", "chosen"),
    [
        ("auto", None, "0"),
        ("auto", "2,3", "2"),
        ("auto", "", ""),
        ("cpu", "2,3", ""),
        ("cuda:1", None, "1"),
        ("cuda:1", "2,3", "3"),  # as torch counts them
        ("cuda:2", "2,3", ""),
        ("GPU-8a1b", "2,3", "GPU-8a1b"),
        ("MIG-77ff", None, "MIG-77ff"),
    ],
)
def test_a_horse_sees_one_gpu_of_those_that_the_daemon_may_use(wanted, visible, chosen):
    assert visible_devices(wanted, visible) == chosen


@pytest.mark.slow
def test_a_horse_whose_gpu_cannot_be_used_reports_why_and_hides_it_from_the_trainer():
    share, *found = child(CHOOSE)
    works, too_old, too_old_and_wanted, cpu = map(json.loads, found)
    assert share == "(0.4, 0)"
    problem = "CUDA driver version is insufficient for CUDA runtime version"
    assert works == ["cuda:0", None, True, False]  # the last: no attention of cuDNN
    assert too_old[:3] == too_old_and_wanted[:3] == ["cpu", problem, False]
    assert cpu[:3] == ["cpu", None, False]


@pytest.mark.parametrize(
    ("wanted", "began_on", "message"),
    [
        (
            "auto",
            "cuda:0",
            "device: the job began on a GPU, and there is none now: CUDA finds none",
        ),
        ("cuda:5", "cpu", "device: must be a GPU that can be used, got cuda:5: CUDA finds none"),
        ("auto", "cpu", None),
        ("auto", None, None),  # as an earlier version recorded it: not at all
        ("cpu", "cuda:0", None),  # asked for
    ],
)
def test_a_job_does_not_fall_back_to_the_cpu_silently(tmp_path, wanted, began_on, message):
    rundir = RunDir(tmp_path)
    with EventLog(rundir.events, execution=1) as events:
        events.emit("started", **({"device": began_on} if began_on else {}))
    request = RunJob("j", "w", "", 2, 1, None, 0, None, device=wanted)
    with EventLog(rundir.events, execution=2) as events:
        if message is None:
            check_device(request, rundir, events, Placement("cpu"))
        else:
            with pytest.raises(JobFailed, match=message):
                check_device(request, rundir, events, Placement("cpu"))


def test_a_gpu_that_cannot_be_used_is_reported_once_by_the_job_that_wanted_one(tmp_path):
    rundir = RunDir(tmp_path)
    request = RunJob("j", "w", "", 1, 1, None, 0, None)
    with EventLog(rundir.events, execution=1) as events:
        check_device(request, rundir, events, Placement("cpu", problem="the driver is too old"))
    [event] = read(rundir.events)
    assert event["message"] == (
        "the GPU cannot be used, computing on the CPU: the driver is too old"
    )
