"""The device's ceilings: a large copy, a large read, a copy within the L2 cache, large products in bf16 and fp32."""

from collections.abc import Callable

# Measures a call: the median time in milliseconds.
MedianMs = Callable[[Callable[[], object]], float]

_BUFFER_BYTES = 2**30
# So large that what a flush left to be written back is less than 1 % of what is read; and never more than this share of
# the free memory.
_READ_BYTES, _READ_SHARE = 2**33, 0.5
_PRODUCT_SIZE, _FP32_PRODUCT_SIZE = 8192, 4096
# Both buffers together fill so much of the L2 cache, of which a GPU may keep two copies; they are copied so many times.
_L2_SHARE, _L2_TIMES = 0.25, 100


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


def read_bandwidth_gbps(median_ms: MedianMs, free_bytes: int, device: str = "cuda") -> float:
    """GB/s of a kernel that reads the device's memory and writes next to nothing, which can be more than a copy moves.

    Raises torch.OutOfMemoryError if memory is too small.
    """
    import torch

    from glabench.devices.moving import PIECE, read_pieces

    pieces = max(1, min(_READ_BYTES, int(_READ_SHARE * free_bytes)) // (4 * PIECE))
    numbers = torch.randint(-(2**31), 2**31, (pieces * PIECE,), dtype=torch.int32, device=device)
    found = numbers.new_empty(pieces)
    return numbers.numel() * numbers.element_size() / median_ms(lambda: read_pieces(numbers, found)) / 1e6


def l2_copy_gbps(median_ms: MedianMs, l2_bytes: int, device: str = "cuda") -> float:
    """GB/s that a copy within a GPU's L2 cache reads plus writes, all multiprocessors together."""
    import torch

    from glabench.devices.moving import BLOCK, copy_to_and_fro

    size = max(1, int(l2_bytes * _L2_SHARE) // (2 * 4 * BLOCK)) * BLOCK
    source = torch.randint(-(2**31), 2**31, (size,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    moved = 2 * 2 * _L2_TIMES * size * source.element_size()
    return moved / median_ms(lambda: copy_to_and_fro(source, target, _L2_TIMES)) / 1e6


def fp32_product_tflops(median_ms: MedianMs, device: str = "cuda", size: int = _FP32_PRODUCT_SIZE) -> float:
    """TFLOP/s of a square product of random matrices in fp32, off the tensor cores unless torch is told otherwise."""
    import torch

    a, b, out = (torch.randn(size, size, device=device) for _ in range(3))
    return 2 * size**3 / median_ms(lambda: torch.mm(a, b, out=out)) / 1e9


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
