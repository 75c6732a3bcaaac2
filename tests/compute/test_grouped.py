"""Weights with a scale per group of inputs, int8 and int4: exact sums, the best scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from needs import needs

from warmd.jobs.compute import native
from warmd.jobs.compute.levels import levels

SIZES = [(64, 64), (200, 97), (130, 4864), (1, 1)]
ROWS = (1, 2, 5, 6, 7, 13, 40)
BITS = (8, 4)


@pytest.fixture(autouse=True)
def served():
    needs(native.is_available() and levels().int4 is not None, "kernels for int4")


def linear(bits, weights, bias=None):
    from warmd.jobs.compute.native import panels

    make = {8: panels.grouped_int8_linear, 4: panels.grouped_int4_linear}[bits]
    return make(weights, bias)


def stored(layer, bits):
    """The integers (out, groups, 32) and scales (out, groups) in the panels of a layer."""
    from warmd.jobs.compute.native import grouped as g

    outputs, inputs = layer._padded_outputs, layer._padded_inputs
    group = g.SCALE_BYTES + g.INPUTS * bits // 8
    panels = layer.packed.numpy().reshape(outputs // g.PANEL, inputs // g.INPUTS, g.PANEL * group)
    halves = np.ascontiguousarray(panels[..., : 2 * g.PANEL]).view(np.uint16).astype(np.uint32)
    scales = (halves << 16).view(np.float32).transpose(0, 2, 1).reshape(outputs, -1)
    codes = np.ascontiguousarray(panels[..., 2 * g.PANEL :])
    codes = codes.reshape(*panels.shape[:2], -1, g.PANEL, 4).astype(np.int64)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=3) - g.INT4_ZERO
        codes = codes.transpose(0, 4, 1, 2, 3, 5)
    else:
        codes = np.where(g.INT8_ZERO, codes - g.INT8_ZERO, codes.astype(np.int8).astype(np.int64))
        codes = codes.transpose(0, 3, 1, 2, 4)
    return codes.reshape(outputs, inputs // g.INPUTS, g.INPUTS), scales


def quantized(x):
    """The integers (rows, groups, 32) and scales (rows, groups) of inputs, as `grouped` says."""
    groups = np.pad(x.numpy(), ((0, 0), (0, -x.shape[1] % 64))).reshape(len(x), -1, 32)
    largest = np.maximum(np.abs(groups).max(2), np.float32(1e-10))
    factor = np.float32(1) / largest * np.float32(127)
    # By fma: one rounding of the product and the sum.
    whole = (groups.astype(np.longdouble) * factor[..., None] + 128.5).astype(np.float32)
    return whole.astype(np.int64) - 128, largest / np.float32(127)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_layer_has_exact_sums_in_groups_and_adds_them_in_order(bits, sizes):
    torch.manual_seed(0)
    weight, x = torch.randn(sizes), torch.randn(max(ROWS), sizes[1])
    layer = linear(bits, [weight])
    (q, scales), (qx, scales_x) = stored(layer, bits), quantized(x)
    sums = np.einsum("ogk,rgk->rog", q, qx).astype(np.float32)
    y = np.zeros(sums.shape[:2], dtype=np.float32)
    for group in range(sums.shape[2]):
        scale = scales[None, :, group] * scales_x[:, None, group]
        y = (sums[..., group].astype(np.longdouble) * scale + y).astype(np.float32)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), torch.from_numpy(y[:rows, : sizes[0]]))


@pytest.mark.parametrize("bits", BITS)
def test_a_bias_and_several_weights_are_fused_and_bfloat16_weights_are_read(bits):
    weights, bias = [torch.randn(100, 192), torch.randn(28, 192)], torch.randn(128)
    halves, x = [weight.bfloat16() for weight in weights], torch.randn(9, 192)
    y = linear(bits, weights, bias)(x)
    apart = torch.cat([linear(bits, [weight])(x) for weight in weights], dim=1)
    assert torch.equal(y, apart + bias)
    wide = [weight.float() for weight in halves]
    assert torch.equal(linear(bits, halves)(x), linear(bits, wide)(x))


@pytest.mark.parametrize("bits", BITS)
def test_integers_are_the_nearest_to_the_weights_in_their_scale(bits):
    torch.manual_seed(0)
    weight = torch.randn(128, 256) * torch.logspace(-6, 6, 128)[:, None]
    q, scales = stored(linear(bits, [weight]), bits)
    groups = weight.view(128, -1, 32).double().numpy()
    nearest = np.clip(
        np.rint(groups / scales[..., None]), -8 if bits == 4 else -127, 2**bits // 2 - 1
    )
    assert (np.abs(q - nearest) > 0).mean() < 1e-3  # ties and the last bit of the division
    assert (np.abs(q - nearest) <= 1).all()
    if bits == 8:
        assert (np.abs(groups - q * scales[..., None]) <= 0.501 * np.abs(scales[..., None])).all()


def test_the_scale_of_int4_has_less_error_than_that_of_the_largest_weight():
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    q, scales = stored(linear(4, [weight]), 4)
    groups = weight.view(256, -1, 32).numpy()
    ours = ((groups - q * scales[..., None]) ** 2).mean()
    largest = np.take_along_axis(groups, np.abs(groups).argmax(2)[..., None], 2)
    plain = largest / -8  # as GGUF's Q4_0
    rounded = np.clip(np.rint(groups / plain), -8, 7) * plain
    assert ours < 0.9 * ((groups - rounded) ** 2).mean()


@pytest.mark.parametrize("bits", BITS)
def test_extreme_weights_neither_overflow_nor_vanish(bits):
    weight = torch.full((64, 64), 1.0)
    weight[1::2] = -1
    weight[3, :32] = 0
    weight[5], weight[6, 0] = 1e-30, float("nan")
    x = torch.full((7, 64), -1.0)
    y = linear(bits, [weight])(x)
    exact = x @ weight.T
    assert y[:, 6].isnan().all()
    kept = [column for column in range(64) if column not in (5, 6)]
    torch.testing.assert_close(y[:, kept], exact[:, kept], rtol=0.01, atol=0)
    assert y[:, 5].abs().max() < 1e-7
