import sys, torch
sys.path.insert(0, 'tests/gpu/by_hand')
from common import *
force('pair')
def ref(q, k, v, g, s, init, C=64):
    B, T, H, K = q.shape; V = v.shape[-1]
    S = init; o = []
    for t in range(0, T, C):
        qc, kc, vc = (x[:, t:t+C].transpose(1, 2) for x in (q, k, v))
        n = qc.shape[2]
        a = torch.zeros(B, H, n, dtype=q.dtype, device=q.device) if g is None else g[:, t:t+C].transpose(1, 2).clamp(min=-1e4).cumsum(-1)
        d = (a[..., :, None] - a[..., None, :])
        m = torch.ones(n, n, device=q.device).tril().bool()
        D = torch.where(m, d, 0.).clamp(min=-2000).exp() * m
        P = (qc @ kc.transpose(-1, -2)) * D
        o.append((s * (a.exp()[..., None] * (qc @ S) + P @ vc)).transpose(1, 2))
        S = a[..., -1].exp()[..., None, None] * S + (kc * (a[..., -1:] - a).exp()[..., None]).transpose(-1, -2) @ vc
    return torch.cat(o, 1), S
shapes = [(27, 191, 4, 128, 256), (3, 700, 2, 128, 512), (20, 300, 4, 112, 256), (2, 64, 3, 64, 256), (1, 1, 1, 128, 256)]
kinds = 'none head strong resets inf zero'.split()
shapes, kinds = [(27, 191, 4, 128, 256), (3, 700, 2, 112, 512), (1, 65, 2, 64, 256)], 'none head resets inf'.split()
bad = 0
for shape in shapes:
    B, T, H, K, V = shape
    for kind in kinds:
        gen = torch.Generator('cuda'); gen.manual_seed(1)
        r = lambda *s: torch.randn(*s, device='cuda', generator=gen)
        q, k, v = r(B, T, H, K).bfloat16(), r(B, T, H, K).bfloat16(), r(B, T, H, V).bfloat16()
        init = r(B, H, K, V); g = gates(kind, B, T, H, gen)
        do, dS = r(B, T, H, V).bfloat16(), r(B, H, K, V)
        xs = [x.clone().requires_grad_() for x in (q, k, v, init)] + ([] if g is None else [g.clone().requires_grad_()])
        for mat in (True, False):
            blocks = [torch.full((2**24 // 4,), float("nan"), device="cuda") for _ in range(40)]; del blocks
            runs = []
            for rep in range(3):
                o, S = call(kind, xs[0], xs[1], xs[2], xs[4] if g is not None else None, initial_state=xs[3], output_final_state=True, materialize=mat)
                runs.append([o, S, *torch.autograd.grad((o, S), xs, (do, dS))])
            with torch.no_grad():
                oi, Si = call(kind, q, k, v, g, initial_state=init, output_final_state=True)
            if mat:
                ds = [x.double().detach().requires_grad_() for x in xs]
                ro, rS = ref(*ds[:3], ds[4] if g is not None else None, K ** -.5, ds[3])
                want = [ro, rS, *torch.autograd.grad((ro, rS), ds, (do.double(), dS.double()))]
            names = ['o', 'S', 'dq', 'dk', 'dv', 'dS0', 'dg'][:len(want)]
            err = {n: float((a.double() - b).norm() / b.norm()) if b.norm() > 0 else float(a.double().norm()) for n, a, b in zip(names, runs[0], want)}
            if kind == 'inf': err.pop('dg')
            err['oi'] = float((oi.double() - ro).norm() / ro.norm()); err['Si'] = float((Si.double() - rS).norm() / rS.norm())
            same = all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))
            ok = same and all(e < 5e-3 for e in err.values())
            bad += not ok
            print('ok ' if ok else 'BAD', shape, kind, mat, 'same' if same else 'DIFFER', {n: f'{e:.1e}' for n, e in err.items()}, flush=True)
for kind in ('none', 'head'):
    lengths = [64, 1, 0, 300, 129, 700]; T = sum(lengths); H, K, V = 4, 128, 256
    gen = torch.Generator('cuda'); gen.manual_seed(2)
    r = lambda *s: torch.randn(*s, device='cuda', generator=gen)
    q, k, v = r(1, T, H, K).bfloat16(), r(1, T, H, K).bfloat16(), r(1, T, H, V).bfloat16()
    init = r(len(lengths), H, K, V); g = gates(kind, 1, T, H, gen)
    cu = torch.tensor([0, *lengths], device='cuda').cumsum(0)
    with torch.no_grad():
        for kw in ({}, {'materialize': False}):
            o, S = call(kind, q, k, v, g, initial_state=init, output_final_state=True, cu_seqlens=cu, **kw)
    xs = [x.clone().requires_grad_() for x in (q, k, v)]
    o2, S2 = call(kind, *xs, g, initial_state=init, output_final_state=True, cu_seqlens=cu)
    worst = 0.
    for n, L in enumerate(lengths):
        w = slice(int(cu[n]), int(cu[n]) + L)
        if L == 0: continue
        ro, rS = ref(*(x[:, w].double() for x in (q, k, v)), None if g is None else g[:, w].double(), K ** -.5, init[n:n+1].double())
        for a, b in ((o[:, w], ro), (S[n:n+1], rS), (o2[:, w], ro), (S2[n:n+1], rS)): worst = max(worst, float((a.double() - b).norm() / b.norm()))
    bad += not worst < 5e-3
    print('ok ' if worst < 5e-3 else 'BAD', 'packed', kind, worst)
print('BAD' if bad else 'ALL OK', bad)
