"""Tunes fla-core's kernels for the shapes of the presets, and stores what its autotuner chose as fla reads it.

    python tests/gpu/tune_fla.py results/fla-autotune
    FLA_CACHE_MODE=strict FLA_CONFIG_DIR=results/fla-autotune glabench run gates

Without it, the first process on a machine waits for minutes: fla times some 270 candidates for each pair of head dims.
They are compiled here by other processes, in parallel, and timed by this one, alone on the GPU, as fla would. Kernels
that fla tunes by Triton's own autotuner (`fla.ops.common`) are not stored: Triton remembers them for the machine.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shares import COUNT, compile_every

# Op, dtype, (B, T, H, K, V). fla's kernels are tuned for dtypes and head dims, and some for B and H, but for no T.
FAMILIES = [
    ("gla", "bfloat16", (32, 4096, 16, 64, 64)), ("gla", "bfloat16", (32, 2048, 4, 128, 256)),
    ("gla", "bfloat16", (4, 4096, 64, 128, 128)), ("gla", "bfloat16", (8, 2048, 4, 256, 512)),
    ("linear", "bfloat16", (32, 4096, 16, 64, 64)), ("gla", "float16", (4, 2048, 16, 64, 64)),
    ("gla", "float16", (4, 2048, 4, 128, 256)),
]  # fmt: skip
MORE = [
    ("gla", "bfloat16", (1, 32768, 4, 128, 256)), ("gla", "bfloat16", (8, 4096, 4, 128, 256)),
    ("gla", "bfloat16", (1, 4096, 16, 64, 64)),
]  # fmt: skip
COMPILE_T = 128


def call(op, dtype, B, T, H, K, V):
    """A forward and a backward."""
    import torch
    from fla.ops.gla import chunk_gla
    from fla.ops.linear_attn import fused_chunk_linear_attn

    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    leaves = [torch.randn(B, T, H, D, device="cuda", dtype=dtype).requires_grad_() for D in (K, K, V)]
    if op == "gla":
        g = torch.nn.functional.logsigmoid(torch.randn(B, T, H, K, device="cuda")) / 16
        o, _ = chunk_gla(*leaves, g.requires_grad_())
    else:
        o, _ = fused_chunk_linear_attn(*leaves, normalize=False)
    o.backward(torch.ones_like(o))
    torch.cuda.synchronize()


def compile_share(rank, count, folder):
    """Compiles every `count`-th candidate of every kernel, and marks the families that are done."""
    import torch

    compile_every(rank, count)
    for number, (op, dtype, (B, _, H, K, V)) in enumerate(FAMILIES):
        call(op, dtype, B, COMPILE_T, H, K, V)
        torch.cuda.empty_cache()  # the GPU's memory is for all of these processes
        (folder / f"{number}-{rank}").touch()


def store(folder):
    """Writes one file per kernel, as `fla.ops.utils.cache` reads it."""
    from fla.ops.utils.cache import AutotuneKey, CachedAutotuner

    for kernel in [x for x in gc.get_objects() if type(x) is CachedAutotuner and x.cache]:
        entries = {}
        for key, config in kernel.cache.items():
            fields = ("kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
            chosen = {name: getattr(config, name) for name in fields}
            entries[AutotuneKey.key_hash(key)] = {"autotune_key": list(key), "config": chosen}
        text = json.dumps({"kernel_name": kernel.kernel_name, "autotune_entries": entries}, indent=1, sort_keys=True)
        (folder / f"{kernel.kernel_name}.json").write_text(text + "\n")


def tune(out):
    """Compiles in parallel, and times each family as soon as it is compiled."""
    out.mkdir(parents=True, exist_ok=True)
    count, start = COUNT, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        shares = [
            subprocess.Popen(
                [sys.executable, __file__, "--share", str(rank), str(count), folder],
                env=os.environ | {"FLA_CACHE_RESULTS": "0"},
            )
            for rank in range(count)
        ]
        for number, (op, dtype, shape) in enumerate(FAMILIES):
            while len(list(Path(folder).glob(f"{number}-*"))) < count and any(x.poll() is None for x in shares):
                time.sleep(0.2)
            call(op, dtype, *shape)
            store(out)  # at once: the rest may be cut off
            print(f"{op} {dtype} {shape}: tuned after {time.perf_counter() - start:.0f} s", flush=True)
        for share in shares:
            share.wait()
    for op, dtype, shape in MORE:
        call(op, dtype, *shape)
    store(out)
    print(f"{len(list(out.iterdir()))} kernels in {out}, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    if sys.argv[1] == "--share":
        compile_share(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        tune(Path(sys.argv[1]))
