"""Memory in huge pages: its content does not change, and nothing fails if there are none."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest
import torch
from needs import needs

from warmd.jobs.compute import hugepages

PAGES = 9
KERNEL = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])


def huge_bytes() -> int:
    """Bytes of this process that lie in huge pages."""
    with open("/proc/self/smaps_rollup") as lines:
        (found,) = (int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))
    return 1024 * found


def in_small_pages(count: int) -> torch.Tensor:
    """int64 numbers 0, 1, ... in memory of their own.

    torch's allocator may return freed memory that the kernel has in huge pages already.
    """
    memory = mmap.mmap(-1, 8 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    x = torch.frombuffer(memory, dtype=torch.int64)
    torch.arange(count, out=x)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return x


def test_a_move_to_huge_pages_keeps_values_and_addresses():
    needs(sys.platform == "linux" and KERNEL >= (6, 1), "Linux 6.1")
    x = in_small_pages(PAGES * hugepages.HUGE_PAGE // 8)
    before, expected = huge_bytes(), x.clone()
    unmapped = (2**46, 5 * hugepages.HUGE_PAGE)  # comes first, and is no reason to stop
    steps = sum(1 for _ in hugepages.move([(x.data_ptr(), x.nbytes), unmapped]))
    assert huge_bytes() - before >= (PAGES - 1) * hugepages.HUGE_PAGE
    assert torch.equal(x, expected)
    assert steps >= PAGES // 4  # other work runs in between


@pytest.mark.parametrize("areas", [[], [(2**40, 0)]])
def test_without_memory_to_move_nothing_is_done(areas):
    assert list(hugepages.move(areas)) == []


@pytest.mark.slow
def test_a_move_that_this_system_refuses_is_not_tried_again():
    needs(sys.platform == "linux", "Linux")
    # PR_SET_THP_DISABLE makes the kernel refuse all requests of this process for huge pages.
    script = f"""
import ctypes
import torch
from warmd.jobs.compute import hugepages
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0
x = torch.zeros({40 * hugepages.HUGE_PAGE}, dtype=torch.uint8)
print(sum(1 for _ in hugepages.move([(x.data_ptr(), x.nbytes)])))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("10", 0), done.stderr
