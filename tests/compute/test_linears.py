"""Linear layers of the engine: the forms of each, and the bits of their rows."""

from __future__ import annotations

import pytest
import torch
from needs import needs

from warmd.configs.precision import PRECISIONS
from warmd.jobs.compute import onednn
from warmd.jobs.compute.linear_forms import UnpackedLinear
from warmd.jobs.compute.linears import LinearBuilder, innermost, served_precision


@pytest.mark.parametrize("inputs", [96, 4864])  # in one block of oneDNN's kernel, and in several
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_kind_of_linear_layer_is_batch_invariant(precision, inputs):
    torch.manual_seed(0)
    with torch.inference_mode():
        linears = LinearBuilder(served_precision(precision, torch.ones(1)))
        parts = [torch.nn.Linear(inputs, 200), torch.nn.Linear(inputs, 40, bias=False)]
        layer = linears.fused(parts, patience=9)
        x = torch.randn(23, inputs)
        found = [torch.cat([layer(rows) for rows in x.split(size)]) for size in (23, 1, 3, 7)]
    assert linears.is_batch_invariant
    assert all(torch.equal(y, found[0]) for y in found)
    wanted = torch.cat([part(x) for part in parts], dim=1)
    rounding = 0.2 if precision == "int4" else 0.05
    torch.testing.assert_close(found[0], wanted, rtol=rounding, atol=rounding)


@torch.inference_mode()
def test_bfloat16_rounding_does_not_hide_that_a_kernel_is_not_batch_invariant():
    torch.manual_seed(0)
    linears = LinearBuilder("native")
    layer = linears.fused([torch.nn.Linear(1216, 240, dtype=torch.bfloat16)], patience=9)
    x = torch.randn(200, 1216, dtype=torch.bfloat16)
    assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), layer(x))


@torch.inference_mode()
def test_layers_that_cannot_be_packed_for_lack_of_memory_stay_unpacked_with_one_warning(caplog):
    needs(onednn.is_available(), "oneDNN in torch")
    linears = LinearBuilder("native", spare_bytes=2**60)  # more than any machine has
    layers = [linears.fused([torch.nn.Linear(48, 20)], patience=2) for _ in range(3)]
    x = torch.randn(5, 48)
    before = [layer(x) for layer in layers]
    for _ in range(4):
        assert all(torch.equal(layer(x), y) for layer, y in zip(layers, before, strict=True))
    assert {type(innermost(layer)) for layer in layers} == {UnpackedLinear}
    (said,) = caplog.messages
    assert "stay unpacked" in said
    assert "GiB are free" in said
