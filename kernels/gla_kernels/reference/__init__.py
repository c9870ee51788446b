"""The same functions in plain PyTorch: `recurrent` is the ground truth, `chunkwise` what one writes without kernels."""
