"""Attention kernels: cost and correctness, also of cuDNN's, which horses do not use."""

from __future__ import annotations

import torch
from torch.nn import functional

from . import DEVICE, HAS_GPU, fact, like_a_horse, needs_gpu, seconds


def random(*shape: int) -> torch.Tensor:
    """Return normal random numbers in bfloat16."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def no_mask(*shape: int) -> torch.Tensor:
    """Return an additive mask that hides nothing."""
    return torch.zeros(*shape, device=DEVICE, dtype=torch.bfloat16)


def attend(queries: int, keys: int, *, has_gradient: bool = False) -> None:
    """Attention of a new shape, with a mask."""
    query = random(1, 2, queries, 64).requires_grad_(has_gradient)
    key = random(1, 2, keys, 64).requires_grad_(has_gradient)
    mask = no_mask(queries, keys)
    found = functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)
    if has_gradient:
        found.sum().backward()


def learned_bias() -> float:
    """Return the gradient of a learned bias, as the code-graph encoder has."""
    bias = no_mask(2, 1, 48, 48).requires_grad_()
    query = random(2, 4, 48, 64).requires_grad_()
    found = functional.scaled_dot_product_attention(query, query, query, attn_mask=bias)
    found.float().pow(2).sum().backward()
    return 0.0 if bias.grad is None else float(bias.grad.float().abs().sum())


def has_finite_gradient() -> bool:
    """Whether the gradient of pytorch#196678 is finite."""
    torch.manual_seed(0)
    query, key = (0.1 * random(1, 1, 704, 64) for _ in range(2))
    query[..., 0], key[..., 0] = 40, -40
    query.requires_grad_()
    mask = no_mask(704, 704)
    functional.scaled_dot_product_attention(query, key, key, attn_mask=mask).sum().backward()
    return query.grad is not None and bool(query.grad.isfinite().all())


def check(kernels: str, *, must_be_right: bool) -> None:
    """Report cost and results of the enabled kernels."""
    attend(64, 64)
    attend(64, 64, has_gradient=True)
    lengths = iter(range(97, 2000, 32))
    forward = seconds(lambda: attend(131, next(lengths)), repeat=9)
    backward = seconds(lambda: attend(131, next(lengths), has_gradient=True), repeat=9)
    ok = max(forward, backward) < 0.005 if must_be_right and HAS_GPU else None
    fact(f"{kernels}: a new shape, ms", 1e3 * forward, "< 1, with cuDNN 20-40", ok)
    fact(f"{kernels}: a new shape with backward, ms", 1e3 * backward, "< 5", ok)
    try:
        gradient: float | str = learned_bias()
    except RuntimeError as error:
        gradient = str(error)[:200]
    ok = isinstance(gradient, float) and gradient > 0 if must_be_right else None
    fact(f"{kernels}: gradient of a learned bias", gradient, "> 0", ok)
    is_finite = has_finite_gradient()
    ok = is_finite if must_be_right else None
    fact(f"{kernels}: gradient of pytorch#196678 is finite", is_finite, "True", ok)


if __name__ == "__main__":
    like_a_horse()
    check("as in a horse", must_be_right=True)
    needs_gpu()
    torch.backends.cuda.enable_cudnn_sdp(True)
    check("with cuDNN", must_be_right=False)
