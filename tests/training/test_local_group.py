"""The exchange between the ranks of one machine: exact, and open to nobody else."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
import torch.distributed as distributed
from breadth import mostly_slow
from processes import (
    add_tensors,
    cannot_prepare,
    exchange,
    fails,
    fails_beside_a_child,
    meets_a_stranger,
    random_tensors,
    run_apart,
    waits_for_rank_1,
)

from warmd.jobs.errors import JobFailed


def sums_of_gloo(size: int) -> list[torch.Tensor]:
    """The sums of the tensors of all ranks by gloo's allreduce."""
    gloo = cast(Any, distributed).ProcessGroupGloo
    store = distributed.HashStore()  # type: ignore[attr-defined]

    def run(rank: int) -> list[torch.Tensor]:
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=60)
        group = gloo(store, rank, size, options)
        found = random_tensors(rank)
        for one in found:
            group.allreduce([one]).wait()
        return found

    with ThreadPoolExecutor(size) as pool:
        first, *_ = pool.map(run, range(size))
    return first


@pytest.mark.parametrize("size", mostly_slow([2, 3, 4], but=[3]))
def test_sums_have_the_bits_of_gloo_which_nodes_and_earlier_versions_use(size: int, tmp_path: Path):
    _, found = run_apart(size, add_tensors, tmp_path)
    assert isinstance(found, dict), found
    for ours, theirs in zip(found["sums"], sums_of_gloo(size), strict=True):
        assert torch.equal(ours, theirs), (ours.dtype, len(ours))


def test_values_of_all_ranks_arrive_exactly_over_sockets_without_a_name(tmp_path: Path):
    long = ["\N{SNOWMAN} \ud800", [0.1, -0.0, 5e-324, math.inf], list(range(300_000))]
    values = [{"a": None, "b": [1, 2**70, True]}, math.nan, long]
    _, found = run_apart(3, partial(exchange, values), tmp_path)
    assert isinstance(found, dict), found
    for rank, of_rank in enumerate(found["of_all"]):
        first, second, third = of_rank["gathered"]
        assert first == of_rank["first"] == values[0]
        assert math.isnan(second)
        assert third == long
        assert math.copysign(1, third[1][1]) == -1
        assert set(of_rank["sockets"]) == {"AF_UNIX"}, rank
    assert found["order"][0] == "0"
    assert sorted(found["order"]) == list("012")
    assert found["environment"] == {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }


def test_a_value_that_json_lacks_is_an_error_and_never_a_pickle(tmp_path: Path):
    _, failed = run_apart(2, partial(exchange, [b"bytes", b"bytes"]), tmp_path)
    assert "TypeError: Object of type bytes is not JSON serializable" in str(failed)


def test_a_rank_that_fails_before_all_are_connected_fails_the_job_with_its_reason(tmp_path: Path):
    run = partial(exchange, [1, 2, 3])
    _, failed = run_apart(3, run, tmp_path, prepare=cannot_prepare)
    assert isinstance(failed, JobFailed), failed
    assert str(failed) == "no memory for a copy"


@pytest.mark.parametrize("run", [fails, meets_a_stranger])
def test_no_rank_waits_to_be_connected_to_one_that_has_failed(run: Any, tmp_path: Path):
    with pytest.raises(AssertionError, match="the processes have died"):
        run_apart(1, partial(waits_for_rank_1, run), tmp_path)


def test_a_failed_rank_is_noticed_although_a_process_that_it_forked_is_left(tmp_path: Path):
    events, failed = run_apart(2, fails_beside_a_child, tmp_path)
    [event] = events
    child = psutil.Process(event["pid"])
    child.kill()  # raises NoSuchProcess if it has ended
    assert isinstance(failed, JobFailed), failed
    assert str(failed).endswith("ValueError: no reward today")
