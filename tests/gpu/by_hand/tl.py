import sys, os, torch
sys.path.insert(0, 'tests/gpu/by_hand')
import importlib
mod = importlib.import_module(os.environ.get('MOD','spec_tl'))
flush = torch.empty(2**28, dtype=torch.int8, device='cuda')
kern = mod.specialized_forward
def run(B,T,H,K,V,head,st):
    q,k=(torch.randn(B,T,H,K,device='cuda').bfloat16() for _ in range(2)); v=torch.randn(B,T,H,V,device='cuda').bfloat16()
    o=torch.empty_like(v); NC=T//64
    g=(-torch.rand(B,H,T//64,64,device='cuda')*.05).cumsum(-1).reshape(B,H,T) if head else None
    states=torch.empty(B*NC,H,K,V,device='cuda',dtype=torch.bfloat16) if st else None
    P=B*H*((V+255)//256); times=torch.zeros(P*2048,dtype=torch.int32,device='cuda')
    s=lambda x:(x.stride(0),x.stride(1),x.stride(2))
    def f():
        names=dict(q=q,k=k,v=v,g=g,o=o,initial=None,final=None,states=states,checkpoints=None,times=times,cu_seqlens=None,scale=K**-.5,
          initial_p=0,final_p=0,T=T,H=H,N=B,base=0,stride=1,piece_chunks=NC+1,checkpoint_chunks=8,
          K=K,V=V,BK=128,BV=256,C=64,HEAD_GATED=bool(head),VARLEN=False,HAS_INITIAL=False,STORE_FINAL=False,STORE_STATES=bool(st),STORE_CHECKPOINTS=False)
        for n,x in zip('qkv',(q,k,v)): names|=dict(zip((f'{n}_b',f'{n}_t',f'{n}_h'),s(x)))
        for n in ('S_b',): pass
        kern[(P,)](*[names[a] for a in kern.arg_names if a in names], num_warps=8)
    for _ in range(3): f()
    torch.cuda.synchronize()
    if 'times' not in kern.arg_names:
        gr = torch.cuda.CUDAGraph()
        with torch.cuda.graph(gr): f()
        ts = []
        for i in range(23):
            flush.zero_(); a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record(); gr.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3)
        print(f'{B},{T},{H},{K},{V} head={head} st={st}: {sorted(ts[3:])[10]:.1f} us alone', flush=True)
        return
    t=times.view(P,64,2,16)[:, :NC].cpu().long() & 0xffffffff
    m=t[:,8:28,0]; c=t[:,8:28,1]
    per=((t[:,9:29,0,0]-t[:,8:28,0,0]) & 0xffffffff).float()
    base=m[:,:,0]
    f=lambda x,b: [int(((x[:,:,i]-b) & 0xffffffff).where(((x[:,:,i]-b)&0xffffffff)<2**31, ((x[:,:,i]-b)&0xffffffff)-2**32).float().median()) if x[:,:,i].any() else None for i in range(11)]
    print(f'{B},{T},{H},{K},{V} head={head} st={st}: period {per.median():.0f}; mult from its start', f(m,base), '; copy from the mult start', f(c,base), flush=True)
for head in (0,1):
    for st in (0,1):
        run(20,2048,4,128,256,head,st)
if os.environ.get('ALL'):
    run(32,2048,4,128,256,1,1)
