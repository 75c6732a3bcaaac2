"""Tensors that are written to disk concurrently with the training."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from warmd.jobs.training.live_tensors import LiveTensors


class File(io.BytesIO):
    def write(self, data: Any, /) -> int:
        return super().write(bytes(data))


def test_a_save_fails_if_a_tensor_was_copied_instead_of_shared():
    weight = torch.arange(1000.0)
    for handed, is_found in ((weight, True), (weight.clone(), False)):
        live = LiveTensors([weight])
        promised = live.watched_bytes([weight, torch.zeros(7)])
        assert promised == 4000
        live.sink(File()).write(handed.numpy().view("uint8"))
        if is_found:
            live.check_read(promised)
        else:
            with pytest.raises(RuntimeError, match=r"4,000 bytes .* and 0 were"):
                live.check_read(promised)
