#!/usr/bin/env python3
"""A forward and backward pass of masked learning: stock code, warmd's, and the floor.

    python tests/benchmarks/mlm.py [--runs 9] [--threads N] [--json]

Stock: the same model with torch's kernels; for BERT also its own loss, with the vocabulary head at
all positions. The two take turns. Floor: the products alone, at the machine's best rate.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from warmd.daemon.horse import _tune_allocator
from warmd.jobs.mlm_bench import measure

UPDATES = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=9, help="pairs, after one to warm up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _tune_allocator()  # as in every work horse; for both sides
    for timing in measure(args.runs):
        update_s = timing["ours_s"] + timing["optimizer_s"]
        hours = UPDATES * update_s / 3600
        if args.json:
            sys.stdout.write(json.dumps({**timing, "hours_of_10000_updates": hours}) + "\n")
        else:
            sys.stdout.write(
                f"{timing['work']:28s} stock {timing['stock_s']:.3f} s  ours {timing['ours_s']:.3f}"
                f"  faster {timing['faster']:.2f}  floor {timing['floor_s']:.3f}"
                f" ({timing['share']:.0%})  AdamW {timing['optimizer_s']:.3f}"
                f"  {UPDATES:,} updates {hours:.1f} h\n"
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
