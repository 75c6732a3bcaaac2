"""Training kernels on a CPU give the results of torch's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from needs import needs
from torch import library as operators
from torch.nn import functional as F

from warmd.jobs.codegraph.encoder import CodeGraphConfig, CodeGraphEncoder
from warmd.jobs.compute import aten_overrides
from warmd.jobs.compute.aten_overrides import fast_kernels


def onednn_kernels() -> AbstractContextManager[None]:
    """oneDNN's GEMM on any processor, also where a job would use MKL's."""
    mkldnn: Any = torch.backends.mkldnn
    needs(mkldnn.is_available(), "a torch with oneDNN")
    return fast_kernels(onednn=True)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


SHAPES = [(1, 300, 400), (2, 256, 256), (7, 64, 800), (111, 96, 384), (300, 8, 200), (5, 0, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
def test_a_gemm_equals_float64_within_rounding(shape, transposed):
    rows, depth, columns = shape
    a = torch.randn(depth, rows).t() if "a" in transposed else torch.randn(rows, depth)
    b = torch.randn(columns, depth).t() if "b" in transposed else torch.randn(depth, columns)
    bias = torch.randn(columns)
    exact = a.double() @ b.double()
    with onednn_kernels():
        product, total = a @ b, torch.addmm(bias, a, b)
    # The bound of a sum of `depth` products, however it is put together (Higham, ASNA, 3.5).
    bound = (depth + 1) * 2**-24 * (a.double().abs() @ b.double().abs() + bias.abs()) + 1e-30
    assert ((product - exact).abs() <= bound).all()
    assert ((total - exact - bias).abs() <= bound).all()


def test_a_slice_of_a_matrix_is_multiplied_by_its_strides():
    a, b = torch.randn(300, 200)[::2, 7:107], torch.randn(100, 300)[:, ::3]
    with onednn_kernels():
        product = a @ b
    torch.testing.assert_close(product, a.contiguous() @ b.contiguous(), rtol=1e-5, atol=1e-4)


def test_operations_other_than_float32_gemm_use_torchs_kernels():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    double = a.double() @ b.double()
    scaled = torch.addmm(a, a, b, beta=0.5, alpha=2)
    full = torch.addmm(a, a, b)
    with onednn_kernels():
        assert torch.equal(a.double() @ b.double(), double)
        assert torch.equal(torch.addmm(a, a, b, beta=0.5, alpha=2), scaled)
        assert torch.equal(torch.addmm(a, a, b), full)


def test_matrices_of_mismatched_sizes_are_refused():
    with onednn_kernels():
        with pytest.raises(RuntimeError):
            torch.randn(64, 65) @ torch.randn(64, 64)
        with pytest.raises(RuntimeError):
            torch.randn(64, 64) @ torch.randn(64, 64).double()


def test_an_encoder_has_the_same_loss_and_gradients_as_with_torchs_kernels():
    config = CodeGraphConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, dropout=0.0,
    )  # fmt: skip
    model = CodeGraphEncoder(config)
    ids = torch.randint(6, 500, (3, 50))
    role = torch.ones_like(ids)
    role[:, 30:] = 2
    rel = (role == 2) * torch.randint(1, 12, (3, 50))
    labels = torch.where(torch.rand(3, 50) < 0.2, ids, -100)

    def gradients():
        model.zero_grad()
        loss = model(
            ids, rel_ids=rel, role_ids=role, depth_ids=rel, mlm_labels=labels, mnm_labels=labels
        ).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients()
    with onednn_kernels():
        found = gradients()
    assert len(expected) == len(found) > 20
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def dropped(x: torch.Tensor, p: float, seed: int = 5) -> torch.Tensor:
    torch.manual_seed(seed)
    return F.dropout(x, p)


@pytest.mark.parametrize("p", [0.0, 0.001, 0.1, 0.5, 0.9, 1.0])
def test_dropout_drops_elements_independently_with_its_probability(p):
    count = 400_000
    with fast_kernels():
        y = dropped(torch.ones(count // 8, 8), p)
    kept = (y != 0).float()
    torch.testing.assert_close(y, kept / (1 - p) if p < 1 else kept)
    error = 5 * (p * (1 - p) / count) ** 0.5
    assert abs(float(kept.mean()) - (1 - p)) <= error
    # The two elements of one random number, and neighbors from two, are independent.
    for apart in (1, 2, 3):
        both = float((kept.flatten()[:-apart] * kept.flatten()[apart:]).mean())
        assert abs(both - (1 - p) ** 2) <= 2 * error


@pytest.mark.parametrize("p", [2e-6, 1e-4, 1 - 2e-6])
def test_dropout_with_a_probability_near_0_or_1_is_torchs(p):
    x = torch.ones(4_000_000)
    stock = dropped(x, p)
    with fast_kernels():
        found = dropped(x, p)
    assert torch.equal(found, stock)
    assert 0 < int((found == 0).sum()) < len(x)


def test_random_numbers_outside_dropout_do_not_change():
    def draw():
        torch.manual_seed(3)
        x = torch.empty(100, 101)
        p = torch.full_like(x, 0.3)
        drawn = [x.bernoulli_(0.3).clone(), torch.bernoulli(p), x.bernoulli_(p).clone()]
        return [*drawn, x.uniform_().clone(), x.normal_().clone(), torch.randperm(5000)]

    stock = draw()
    with fast_kernels():
        found = draw()
    assert all(map(torch.equal, found, stock))


def test_the_gradient_of_dropout_has_the_mask_of_the_forward_pass():
    x = torch.randn(100, 101, requires_grad=True)
    weight = torch.randn(100, 101)
    with fast_kernels():
        y = F.dropout(x, 0.3)
        (y * weight).sum().backward()
    kept = (y != 0).float()
    torch.testing.assert_close(x.grad, weight * kept / 0.7)
    torch.testing.assert_close(y, x * kept / 0.7)


def test_dropout_inside_attention_uses_the_same_kernel():
    length = 100
    query = torch.zeros(2, 3, length, 8)  # sees all alike
    value = torch.eye(length).expand(2, 3, length, length)
    with fast_kernels():
        torch.manual_seed(5)
        found = F.scaled_dot_product_attention(query, query, value, dropout_p=0.1)
        expected = dropped(torch.full_like(value, 1 / length), 0.1)
        torch.manual_seed(5)
        with torch.inference_mode():
            without_autograd = F.scaled_dot_product_attention(query, query, value, dropout_p=0.1)
    torch.testing.assert_close(found, expected)
    assert torch.equal(without_autograd, found)


def test_dropout_of_small_tensors_other_dtypes_or_in_eval_mode_is_torchs():
    for x in (torch.ones(50), torch.ones(100, 101).double(), torch.ones(100, 101).bfloat16()):
        stock = dropped(x, 0.3)
        with fast_kernels():
            assert torch.equal(dropped(x, 0.3), stock)
    x = torch.randn(100, 101)
    with fast_kernels():
        assert torch.equal(F.dropout(x, 0.3, training=False), x)
        with pytest.raises(ValueError, match="probability"):
            F.dropout(x, 1.5)


def test_dropout_masks_depend_on_the_generator_state_and_advance_it():
    x = torch.ones(100, 101)
    with fast_kernels():
        state = torch.get_rng_state()
        first, second = F.dropout(x, 0.1), F.dropout(x, 0.1)
        torch.set_rng_state(state)
        assert torch.equal(F.dropout(x, 0.1), first)
        assert torch.equal(F.dropout(x, 0.1), second)
        assert not torch.equal(first, second)
    assert torch.allclose(first.unique(), torch.tensor([0.0, 1 / 0.9]))


def outcome() -> list[torch.Tensor]:
    torch.manual_seed(5)
    a, b = torch.randn(100, 100), torch.randn(100, 100)
    return [a @ b, torch.addmm(a[0], a, b), F.dropout(a, 0.3), torch.empty(5000).bernoulli_(0.3)]


def test_overrides_are_removed_at_the_end_of_the_block():
    stock = outcome()
    for _ in range(2):
        with onednn_kernels(), fast_kernels():
            assert not torch.equal(outcome()[2], stock[2])
        assert all(map(torch.equal, outcome(), stock))
    assert aten_overrides._depth == 0


def test_a_torch_build_without_replaceable_kernels_keeps_its_own(monkeypatch):
    stock = outcome()
    monkeypatch.delattr(operators, "get_kernel")  # as before torch 2.9
    with fast_kernels(onednn=True):
        assert all(map(torch.equal, outcome(), stock))
