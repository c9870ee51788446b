"""A training step of a small model around `chunk_gla`: how long the GPU is idle in it, and how much of that it causes.

    python tests/gpu/training_step.py

12 layers of width 1024, each with a mixer of 4 heads (K = 128, V = 256) and an MLP, in bf16, on 8 sequences of 2048
tokens; all but the mixer is plain PyTorch. A step runs eagerly, and as a CUDA graph, which does not wait for the host:
the difference is idle time. What is idle without mixers is not because of `chunk_gla`; the rest is an upper bound for
it, since with less work for the GPU the host is late more often.
"""

import time
from statistics import median

import torch
from gla_kernels import chunk_gla
from torch import nn
from torch.nn.functional import logsigmoid, rms_norm, silu

LAYERS, WIDTH, HEADS, K, V, BATCH, T = 12, 1024, 4, 128, 256, 8, 2048


class Layer(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer
        self.inputs = nn.Linear(WIDTH, HEADS * (2 * K + 2 * V), bias=False)
        self.gates = nn.Sequential(nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, HEADS * K))
        self.out = nn.Linear(HEADS * V, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * 2816, bias=False), nn.Linear(2816, WIDTH, bias=False)

    def forward(self, x):
        h = rms_norm(x, (WIDTH,))
        q, k, v, z = self.inputs(h).unflatten(-1, (HEADS, -1)).split((K, K, V, V), -1)
        g = logsigmoid(self.gates(h).float()).unflatten(-1, (HEADS, K)) / 16
        x = x + self.out((rms_norm(self.mixer(q, k, v, g), (V,)) * silu(z)).flatten(-2))
        a, b = self.up(rms_norm(x, (WIDTH,))).chunk(2, -1)
        return x + self.down(silu(a) * b)


def step_ms(run):
    """The median time of a step of a loop, by the host's clock over groups of 5; three groups are for warming up."""
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 200)
    return median(times[3:])


def step_times(name, mixer):
    """Milliseconds of a step: eagerly, and as a graph. The optimizer does its work, but changes nothing."""
    model = nn.Sequential(*(Layer(mixer) for _ in range(LAYERS))).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True, capturable=True)
    x = torch.randn(BATCH, T, WIDTH, device="cuda", dtype=torch.bfloat16)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    eager, graph = step_ms(step), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    alone = step_ms(graph.replay)
    print(f"{name}: eager {eager:.2f} ms, as a graph {alone:.2f} ms: {eager - alone:.2f} ms idle")
    return eager, alone


if __name__ == "__main__":
    eager, alone = step_times("chunk_gla", lambda *inputs: chunk_gla(*inputs)[0])
    other_eager, other_alone = step_times("no mixer", lambda q, k, v, g: v)
    caused = (eager - alone) - (other_eager - other_alone)
    print(f"idle for {1 - alone / eager:.1%} of a step; because of chunk_gla {caused / eager:.1%}")
