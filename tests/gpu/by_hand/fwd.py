import sys, os, torch
sys.path.insert(0, 'tests/gpu/by_hand')
from common import *
force(os.environ.get('TILE', 'auto'))
rep = int(os.environ.get('REP', 20)); flush = torch.empty(2**28, dtype=torch.int8, device='cuda')
def timed(f):
    for _ in range(2): f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): f()
    ts = []
    for i in range(rep + 3):
        flush.zero_()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); graph.replay(); b.record(); torch.cuda.synchronize()
        if i >= 3: ts.append(a.elapsed_time(b) * 1e3)
    return sorted(ts)[len(ts) // 2]
passes = os.environ.get('PASSES', 'infer,fwd').split(',')
for shape in os.environ['SHAPES'].split(';'):
    B, T, H, K, V = map(int, shape.split(','))
    line = []
    for kind in os.environ.get('KINDS', 'none,head,strong').split(','):
        gen = torch.Generator('cuda'); gen.manual_seed(1)
        r = lambda *s: torch.randn(*s, device='cuda', generator=gen)
        q, k, v = r(B, T, H, K).bfloat16(), r(B, T, H, K).bfloat16(), r(B, T, H, V).bfloat16()
        g = gates(kind, B, T, H, gen); do = r(B, T, H, V).bfloat16()
        out = []
        for p in passes:
            xs = [x.clone().requires_grad_(p != 'infer') for x in (q, k, v)] + [None if g is None else g.clone().requires_grad_(p != 'infer')]
            def f():
                if p == 'infer':
                    with torch.no_grad(): return call(kind, *xs)
                o = call(kind, *xs)[0]
                if p == 'both': torch.autograd.grad(o, [x for x in xs if x is not None], do)
            out.append(timed(f))
        line.append(f"{kind} " + '/'.join(f'{x:.1f}' for x in out))
    print(os.environ.get('NAME', ''), os.environ.get('TILE', 'auto'), shape, ' | '.join(line), flush=True)
