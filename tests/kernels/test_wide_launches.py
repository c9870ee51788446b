"""The launches for wide heads end to end, with every Gluon kernel played by a few lines of float64.

What the kernels compute is for tests/gpu; here it is what they are launched over, in which order, and which buffers
they hand on, in every mode. A player does what the kernel's docstring says, to the arguments that it is given.
"""

import itertools
from functools import cache

import pytest
import torch
from gla_kernels import naive_recurrent_gla, wide, wide_pieces
from gla_kernels.call import Call, Gradients, Inputs
from gla_kernels.launch import hopper_plan
from product import product

C = 64
LOG2E = 1.4426950408889634


class Player:
    """Simulates the launches of one call."""

    def __init__(self, call, lengths):
        self.call, self.lengths = call, lengths
        self.begins = [sum(lengths[:n]) for n in range(len(lengths))]
        self.parked = {}

    def launch(self, kernel, tile, programs, arguments, switches, early=True):
        a = dict(zip(kernel.arg_names, arguments, strict=False)) | switches
        if kernel.__name__ == "scan_pieces":
            named = {key: value for key, value in switches.items() if key in kernel.arg_names}
            shape = {"K": self.call.K, "V": self.call.V, "GATED": self.call.gated, "VARLEN": self.call.varlen}
            shape["PDL"] = False
            kernel[programs](*arguments, **named, **shape)
            return
        blocks_k, blocks_v = -(-self.call.K // tile.block_k), -(-self.call.V // tile.block_v)
        others = {"wide_gradients": blocks_k, "wide_readout": 1, "wide_frames": 1, "wide_backward": 1}
        per_place = others.get(kernel.__name__, blocks_k * blocks_v)
        play = getattr(self, kernel.__name__)
        for number in range(programs[0] // (self.call.H * per_place)):
            play(a, number)

    def piece(self, slot, rows):
        """The sequence of a piece and the piece's number in it; as `wide_tiles.find_piece`."""
        if not self.call.varlen:
            return divmod(slot, -(-self.call.T // rows))
        firsts = [begin // rows + n for n, begin in enumerate(self.begins)]
        n = max(n for n, first in enumerate(firsts) if first <= slot)
        return n, slot - firsts[n]

    def first_slot(self, n):
        return self.begins[n] // C + n if self.call.varlen else n * -(-self.call.T // C)

    def rows(self, x, n, chunk):
        """The rows of x in a chunk, [rows, H, D]."""
        row, begin = (0, self.begins[n]) if self.call.varlen else (n, 0)
        return x[row, begin + chunk * C : begin + min(self.lengths[n], (chunk + 1) * C)]

    def frame(self, a, n, chunk):
        """The cumulative gate about the middle [rows, H, K] and the middle [H, K], log2."""
        if a["g"] is None:
            return torch.zeros(1, 1, 1), torch.zeros(1, 1)
        G = (self.rows(a["g"], n, chunk) * LOG2E).cumsum(0)
        return G - G[-1] / 2, G[-1] / 2

    def chunks(self, a, number):
        n, i = self.piece(a["base"] + number * a["stride"], a["piece_chunks"] * C)
        first = i * a["piece_chunks"]
        return n, range(first, min(first + a["piece_chunks"], -(-self.lengths[n] // C)))

    def chunk(self, a, number):
        piece, inside = divmod(number, a["piece_chunks"])
        n, i = self.piece(a["base"] + piece * a["stride"], a["piece_chunks"] * C)
        chunk = i * a["piece_chunks"] + inside
        return n, chunk, chunk * C < self.lengths[n]

    def start(self, a, number):
        state = a["initial"][number] if a["HAS_INITIAL"] else torch.zeros(self.call.H, self.call.K, self.call.V)
        return state.double()

    def park(self, a, n, chunk, S):
        """If a state is stored in the memory of gradients, they are lost."""
        assert self.rows(a["dq"], n, chunk).shape[0] == C
        assert self.call.K == 2 * C
        assert self.call.V <= 4 * C
        self.parked[n, chunk] = S
        for name in ("dq", "dk", "parked"):
            self.rows(a[name].squeeze(3), n, chunk)[...] = float("nan")

    def unpark(self, a, n, chunk):
        assert all(self.rows(a[name].squeeze(3), n, chunk).isnan().all() for name in ("dq", "dk", "parked"))
        return self.parked.pop((n, chunk))

    def checkpoint(self, a, n, chunk, S):
        rows = a["every"] * C
        slot = self.begins[n] // rows + n if self.call.varlen else n * -(-self.call.T // rows)
        a["checkpoints"][slot + chunk // a["every"]] = S

    def wide_recurrence(self, a, number):
        n, chunks = self.chunks(a, number)
        S, decay = self.start(a, number), 0
        for chunk in reversed(chunks) if a["REVERSE"] else chunks:
            G, r = self.frame(a, n, chunk)
            S = S * r.exp2()[..., None]
            slot = number * a["piece_chunks"] + chunk - chunks[0] if a["SCRATCH"] else self.first_slot(n) + chunk
            if a["PARK"]:
                self.park(a, n, chunk, S)
            elif a["STORE_STATES"]:
                a["states"][slot] = S
            x = self.rows(a["x"], n, chunk)
            x = x * a["scale"] * G.exp2() if a["REVERSE"] else x * (-G).exp2()
            S = (S + torch.einsum("thk,thv->hkv", x, self.rows(a["y"], n, chunk))) * r.exp2()[..., None]
            decay = decay + 2 * r
        if a["STORE_END"]:
            a["end"][number] = S
        if a["STORE_DECAYS"]:
            a["decays"][number] = decay

    def wide_forward(self, a, number):
        n, chunks = self.chunks(a, number)
        S = self.start(a, number)
        for chunk in chunks:
            if a["STORE_CHECKPOINTS"] and chunk % a["every"] == 0:
                self.checkpoint(a, n, chunk, S)
            G, r = self.frame(a, n, chunk)
            S = S * r.exp2()[..., None]
            if a["STORE_STATES"]:
                a["states"][self.first_slot(n) + chunk] = S
            q, k, v = (self.rows(a[name], n, chunk) for name in "qkv")
            q, k = q * a["scale"] * G.exp2(), k * (-G).exp2()
            P = torch.einsum("ihk,jhk->hij", q, k).tril()
            self.rows(a["o"], n, chunk)[...] = torch.einsum("hij,jhv->ihv", P, v) + torch.einsum("ihk,hkv->ihv", q, S)
            S = (S + torch.einsum("thk,thv->hkv", k, v)) * r.exp2()[..., None]
        if a["STORE_FINAL"]:
            a["final"][number] = S

    wide_forward_pair = wide_forward

    def wide_frames(self, a, number):
        n, chunk = self.piece(number, C)
        if chunk * C >= self.lengths[n]:
            return
        G, r = self.frame(a, n, chunk)
        q = self.rows(a["q"], n, chunk) * a["scale"] * G.exp2()
        k = self.rows(a["k"], n, chunk) * (-G).exp2()
        for name, x in (("framed_q", q), ("framed_k", k)):
            self.rows(a[name].view_as(a["q"]), n, chunk)[...] = x
        P = torch.einsum("ihk,jhk->hij", q, k).tril()
        P = P.transpose(1, 2) if a["REVERSE"] else P
        self.rows(a["scores"], n, chunk)[..., : len(q)] = P.transpose(0, 1)
        if a["half_gates"] is not None:
            a["half_gates"][number] = r.exp2()

    def wide_walk(self, a, number):
        n, chunks = self.chunks(a, number)
        S = self.start(a, number)
        for chunk in reversed(chunks) if a["REVERSE"] else chunks:
            if a["STORE_CHECKPOINTS"] and chunk % a["every"] == 0:
                self.checkpoint(a, n, chunk, S)
            kept = self.first_slot(n) + chunk
            half = 1.0 if a["half_gates"] is None else a["half_gates"][kept][..., None]
            S = S * half
            if a["STORE_STATES"]:
                a["states"][number * a["piece_chunks"] + chunk - chunks[0] if a["SCRATCH"] else kept] = S
            x, y = (self.rows(a[name].view(*a["z"].shape[:3], -1), n, chunk) for name in "xy")
            z, P = self.rows(a["z"], n, chunk), self.rows(a["scores"], n, chunk)[..., : len(x)]
            out = torch.einsum("ihj,jhv->ihv", P, z) + torch.einsum("ihk,hkv->ihv", x, S)
            self.rows(a["out"], n, chunk)[...] = out
            S = (S + torch.einsum("thk,thv->hkv", y, z)) * half
        if a["STORE_END"]:
            a["end"][number] = S

    def wide_readout(self, a, number):
        n, chunk, there = self.chunk(a, number)
        if not there:
            return
        G, _ = self.frame(a, n, chunk)
        G = -G if a["REVERSE"] else G
        x, y, z = (self.rows(a[name], n, chunk) for name in "xyz")
        x, y = x * G.exp2(), y * (-G).exp2() * a["scale"]
        S = a["states"][number] * (1 if a["REVERSE"] else a["scale"])
        P = torch.einsum("ihk,jhk->hij", x, y)
        P = P.triu() if a["REVERSE"] else P.tril()
        out = torch.einsum("hij,jhv->ihv", P, z) + torch.einsum("ihk,hkv->ihv", x, S)
        self.rows(a["out"], n, chunk)[...] = out

    def wide_backward(self, a, number):
        n, chunks = self.chunks(a, number)
        dS = self.start({"HAS_INITIAL": a["HAS_AFTER"], "initial": a["after"]}, number)
        for chunk in reversed(chunks):
            _, r = self.frame(a, n, chunk)
            dS = dS * r.exp2()[..., None]
            slot = number * a["piece_chunks"] + chunk - chunks[0] if a["SCRATCH"] else self.first_slot(n) + chunk
            self.gradients(a, n, chunk, a["states"][slot], dS)
            G, _ = self.frame(a, n, chunk)
            q = self.rows(a["q"], n, chunk) * a["scale"] * G.exp2()
            dS = (dS + torch.einsum("thk,thv->hkv", q, self.rows(a["do"], n, chunk))) * r.exp2()[..., None]
        if a["STORE_BEFORE"]:
            a["before"][number] = dS

    def wide_gradients(self, a, number):
        n, chunk, there = self.chunk(a, number)
        if there:
            S = a["states"][number]
            self.gradients(a, n, chunk, S, self.unpark(a, n, chunk) if a["PARKED"] else a["dstates"][number])

    def gradients(self, a, n, chunk, S, dS):
        """All gradients of a chunk from the state before it and the gradient of the state after it, in its frame."""
        G, _ = self.frame(a, n, chunk)
        q, k, v, do = (self.rows(a[name], n, chunk) for name in ("q", "k", "v", "do"))
        q, k = q * a["scale"] * G.exp2(), k * (-G).exp2()
        dA = torch.einsum("ihv,jhv->hij", do, v).tril()
        dq = torch.einsum("hij,jhk->ihk", dA, k) + torch.einsum("ihv,hkv->ihk", do, S)
        dk = torch.einsum("hij,ihk->jhk", dA, q) + torch.einsum("jhv,hkv->jhk", v, dS)
        self.rows(a["dq"].squeeze(3), n, chunk)[...] = dq * a["scale"] * G.exp2()
        self.rows(a["dk"].squeeze(3), n, chunk)[...] = dk * (-G).exp2()
        if self.call.K <= 128:
            P = torch.einsum("ihk,jhk->hij", q, k).tril()
            dv = torch.einsum("hij,ihv->jhv", P, do) + torch.einsum("jhk,hkv->jhv", k, dS)
            self.rows(a["dv"], n, chunk)[...] = dv
        if a["dg"] is not None:
            start = (S * (dS + torch.einsum("ihk,ihv->hkv", q, do))).sum(-1)
            balance = k * dk - q * dq
            self.rows(a["dg"].squeeze(3), n, chunk)[...] = start + balance.cumsum(0) - balance


def truth(leaves, initial, lengths, varlen, scale, do, dfinal):
    """o, the final states and all gradients of the float64 recurrence; packed sequences run one by one."""
    outputs, finals = [], []
    for n, length in enumerate(lengths):
        rows = slice(sum(lengths[:n]), sum(lengths[: n + 1])) if varlen else slice(None)
        batch = slice(None) if varlen else slice(n, n + 1)
        if length == 0:
            finals.append(initial[n : n + 1])
            continue
        q, k, v, *g = (x[batch, rows] for x in leaves)
        start = initial[n : n + 1]
        o, final = naive_recurrent_gla(
            q, k, v, g[0] if g else None, scale=scale, initial_state=start, output_final_state=True
        )
        outputs.append(o)
        finals.append(final)
    o, final = torch.cat(outputs, 1 if varlen else 0), torch.cat(finals)
    return [o.detach(), final.detach(), *torch.autograd.grad([o, final], [*leaves, initial], [do, dfinal])]


H = 2


@cache
def problem(K, V, lengths, gated):
    """Inputs by name, incoming gradients among them, and the truth by name: the same however the call is cut."""
    torch.manual_seed(0)
    varlen = len(set(lengths)) > 1
    B, T = (1, sum(lengths)) if varlen else (len(lengths), lengths[0])
    given = {name: torch.randn(B, T, H, D).double() for name, D in (("q", K), ("k", K), ("v", V), ("do", V))}
    given["g"] = -torch.rand(B, T, H, K).double() / 8 if gated else None
    given |= {name: torch.randn(len(lengths), H, K, V) for name in ("initial", "dfinal")}
    names = ["q", "k", "v", *(["g"] if gated else [])]
    leaves = [given[name].clone().requires_grad_() for name in names]
    start = given["initial"].double().requires_grad_()
    expected = truth(leaves, start, lengths, varlen, K**-0.5, given["do"], given["dfinal"].double())
    return given, dict(zip(("o", "final", *(f"d{name}" for name in names), "dinitial"), expected, strict=True))


# Heads of every way through the kernels; and those whose states' gradients wait in the memory of other gradients.
# 600 tokens are ten chunks, the last one not whole: two checkpoints, or three pieces. 576 are nine whole ones.
SHAPES = [
    (K, V, lengths)
    for K, V in [(80, 32), (16, 80), (144, 32), (272, 32), (16, 256)]
    for lengths in [(600, 600), (150, 0, 1, 450, 64), (100, 50), (64,)]
] + [(128, 144, lengths) for lengths in [(576, 576), (600, 600), (100, 28, 64), (64,)]]


def in_default(shape, gates, multiprocessors, kept):
    """Every order of launches, and every launch with and without gates.

    Short sequences are never cut, and packed ones not by 12 multiprocessors. Gates do not change how time is cut.
    """
    K, _, lengths = shape
    packed = len(set(lengths)) > 1
    if max(lengths) <= 256:
        return multiprocessors == 1
    if gates == "gates":
        return multiprocessors != 12 or not (packed or K == 128)
    return multiprocessors == 132 or (multiprocessors == 12 and kept == "states" and not packed)


@product(
    in_default,
    shape=SHAPES,
    gated={"gates": True, "no gates": False},
    multiprocessors=[1, 12, 132],
    materialize={"states": True, "checkpoints": False},
)
def test_the_launches_give_the_recurrence(shape, gated, multiprocessors, materialize, monkeypatch):
    """Few multiprocessors: sequences stay whole. Many: they are cut in pieces that run side by side."""
    monkeypatch.setattr(wide_pieces, "MULTIPROCESSORS", multiprocessors)
    monkeypatch.setattr(wide, "_SCAN_BLOCK", 4096)  # the interpreter takes its time by the program
    K, V, lengths = shape
    given, expected = problem(K, V, lengths, gated)
    q, k, v, do, g, initial, dfinal = (None if x is None else x.clone() for x in given.values())
    N, varlen = len(lengths), len(set(lengths)) > 1
    B, T = q.shape[:2]
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) if varlen else None
    call = Call(B, T, H, K, V, N, varlen, gated, K**-0.5, torch.bfloat16, hopper_plan(K, V, torch.bfloat16))
    player = Player(call, lengths)
    monkeypatch.setattr(Call, "launch", lambda self, *launch, **how: player.launch(*launch, **how))

    inputs = Inputs(q, k, v, g, cu)
    flags = torch.zeros(N, H, dtype=torch.int32)
    o, final = torch.full_like(v, float("nan")), torch.full_like(initial, float("nan"))
    kept = torch.full(call.kept_shape(materialize), float("nan"), dtype=torch.float64 if materialize else torch.float32)
    wide.run_forward(
        call, inputs, flags, o=o, initial=initial, final=final,
        states=kept if materialize else None, checkpoints=None if materialize else kept,
    )  # fmt: skip
    dinitial = torch.full_like(initial, float("nan"))
    gradients = Gradients.empty(call, inputs)
    wide.run_backward(
        call, inputs, do, kept, flags, flags, gradients, dfinal=dfinal, dinitial=dinitial, materialized=materialize
    )
    found = [o, final, *(x for x in gradients.summed(inputs) if x is not None), dinitial]
    for x, (name, y) in zip(found, expected.items(), strict=True):
        assert (x.double() - y).norm() <= 1e-6 * y.norm(), name


@pytest.mark.parametrize("materialize", [True, False])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (128, 256), (256, 128), (256, 256), (384, 128), (128, 192)])
def test_calls_of_the_same_form_launch_the_same_kernels(K, V, materialize, monkeypatch):
    """So that a first call's rehearsal has compiled what every later one of its form launches."""
    launched = set()
    monkeypatch.setattr(
        Call,
        "launch",
        lambda self, kernel, tile, programs, arguments, switches, early=True: launched.add(
            (kernel.__name__, tile, tuple(switches.items()))
        ),
    )
    seen = {}
    for B, T, H in itertools.product((1, 2, 33), (250, 256, 2047, 2048, 32768), (1, 6, 10, 15, 17, 24, 32, 40)):
        call = Call(B, T, H, K, V, B, False, True, 1.0, torch.bfloat16, hopper_plan(K, V, torch.bfloat16))
        q, k, v, do, g = (torch.empty(B, T, H, D, device="meta") for D in (K, K, V, V, K))
        inputs, flags = Inputs(q, k, v, g, None), torch.empty(B, H, dtype=torch.int32, device="meta")
        kept = torch.empty(call.kept_shape(materialize), device="meta")
        state = torch.empty(call.state_shape(B), device="meta")
        launched.clear()
        wide.run_forward(
            call, inputs, flags, o=torch.empty_like(v), initial=None, final=None,
            states=kept if materialize else None, checkpoints=None if materialize else kept,
        )  # fmt: skip
        gradients = Gradients.empty(call, inputs)
        wide.run_backward(
            call, inputs, do, kept, flags, flags, gradients, dfinal=None, dinitial=state, materialized=materialize
        )
        assert seen.setdefault(wide_pieces.form(call), set(launched)) == launched, (B, T, H)
    assert len(seen) > 2
