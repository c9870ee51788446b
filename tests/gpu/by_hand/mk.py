"""Makes tests/gpu/by_hand/spec_tl.py from the kernel: clocks at the marks '#@m N' / '#@c N' lines inserted by pattern."""
import sys
s=open(sys.argv[1] if len(sys.argv)>1 else 'kernels/gla_kernels/hopper/wide/specialized.py').read()
def after(pat, who, n, nth=0):
    global s
    i=-1
    for _ in range(nth+1):
        i=s.index(pat,i+1)
    ls=s.rfind('\n',0,i)+1; ind=len(s[ls:i])-len(s[ls:i].lstrip())
    e=s.index('\n',i)+1
    s=s[:e]+' '*ind+f"note(times, {who}, j, {n})\n"+s[e:]
s=s.replace('''@gluon.jit
def signal(bar):''','''@gluon.jit
def note(times, W: gl.constexpr, j, N: gl.constexpr):
    now = gl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r,r", [j], dtype=gl.int32, is_pure=False, pack=1)
    gl.store(times + (j * 2 + W) * 16 + N, now)


@gluon.jit
def signal(bar):''')
import re
pts=open(sys.argv[2] if len(sys.argv)>2 else 'tests/gpu/by_hand/points.txt').read().strip().splitlines()
for l in pts:
    who,n,nth,pat=l.split(' ',3)
    after(pat, 0 if who=='m' else 1, int(n), int(nth))
s=re.sub(r"(stored,\s+kept,)", r"\1 times,", s)
s=s.replace("    cu_seqlens,  # [N","    times,\n    cu_seqlens,  # [N")
s=s.replace("    wait_for_previous_kernel()\n    pid = gl.program_id(0)","    wait_for_previous_kernel()\n    pid = gl.program_id(0)\n    times += pid * 2048")
open('tests/gpu/by_hand/spec_tl.py','w').write(s)
