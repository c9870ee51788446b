"""Calls as torch sees them: checks, the registered operators, eager calls around them, and what one pass does.

- `checks`: errors of arguments.
- `ops`: the operators, their fake implementations and autograd, for what traces or changes calls.
- `recurrent`: the operators that go token by token.
- `eager`: eager calls, which go around them; `plain` says when that is allowed.
- `kinds`: the passes of calls like one that has been seen, which are repeated.
- `passes`: a forward and a backward: what is allocated, and what is launched; `launches`: that, for every family.
- `rehearsal`: compiles the kernels of a first call in parallel.
"""
