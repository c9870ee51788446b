import os, torch
import torch.nn.functional as F
import gla_kernels
from gla_kernels import chunk_simple_gla, chunk_linear_attn
from gla_kernels.hopper.wide import launches, pieces
from gla_kernels.launching.plans import narrower_state_tile
def force(which):
    if which == 'auto': return
    def tile(call, count):
        w = call.plan.forward
        return w if which == 'pair' else narrower_state_tile(w)
    launches.forward_tile = tile; pieces.forward_tile = tile
def gates(kind, B, T, H, gen):
    u = lambda: torch.rand(B, T, H, device='cuda', generator=gen)
    n = torch.randn(B, T, H, device='cuda', generator=gen)
    if kind == 'none': return None
    if kind == 'head': return F.logsigmoid(n) / 16
    if kind == 'strong': return -5 * u()
    if kind == 'resets': return torch.where(u() < .1, -50., F.logsigmoid(n) / 16)
    if kind == 'inf': return torch.where(u() < .05, -float('inf'), F.logsigmoid(n))
    if kind == 'zero': return torch.zeros(B, T, H, device='cuda')
def call(kind, q, k, v, g, **kw):
    if kind == 'none': return chunk_linear_attn(q, k, v, **kw)
    return chunk_simple_gla(q, k, v, g, **kw)
