"""The device's ceilings: the bandwidth of a large copy and the speed of a large bf16 product."""

from collections.abc import Callable

# Measures a call: the median time in milliseconds.
MedianMs = Callable[[Callable[[], object]], float]

_BUFFER_BYTES = 2**30
_PRODUCT_SIZE = 8192


def copy_bandwidth_gbps(median_ms: MedianMs, device: str = "cuda", buffer_bytes: int = _BUFFER_BYTES) -> float | None:
    """GB/s that a copy within the device's memory reads plus writes; None if memory is too small.

    The buffer is many times larger than the L2 and holds random data, because copies of zeros can be faster.
    """
    import torch

    try:
        source = torch.randint(-(2**31), 2**31, (buffer_bytes // 4,), dtype=torch.int32, device=device)
        target = torch.empty_like(source)
    except torch.OutOfMemoryError:
        return None
    return 2 * source.numel() * source.element_size() / median_ms(lambda: target.copy_(source)) / 1e6


def product_tflops(median_ms: MedianMs, device: str = "cuda", size: int = _PRODUCT_SIZE) -> float | None:
    """TFLOP/s of a square product of random matrices, in bf16 or on a CPU in fp32; None if memory is too small.

    A long product runs at the clock that the power limit allows, as products in a model do.
    """
    import torch

    try:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        a, b, out = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))
    except torch.OutOfMemoryError:
        return None
    return 2 * size**3 / median_ms(lambda: torch.mm(a, b, out=out)) / 1e9
