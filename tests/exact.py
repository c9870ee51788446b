"""The recurrence and its gradients in float64: the truth that kernels are held against."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]

STATES = ("initial", "final", "dinitial", "dfinal")  # [B, H, K, V]; all others are rows of tokens, [B, T, H, K or V]
SEGMENT = 16  # tokens whose states are in memory at a time


@torch.no_grad()
def outputs_and_gradients(inputs: dict[str, torch.Tensor | None], grads: Tensors, heads: int | None = None) -> Tensors:
    """What `gla_cases.run` gives for `naive_recurrent_gla` in float64: token by token too, but without autograd.

    With `S_t = diag(exp g_t) S_{t-1} diag(exp gv_t) + k_t^T v_t`, `o_t = scale * q_t S_t`, and G_t the gradient of S_t,

        G_t = scale * q_t^T do_t + diag(exp g_{t+1}) G_{t+1} diag(exp gv_{t+1}),
        dq_t = scale * do_t S_t^T,  dk_t = v_t G_t^T,  dv_t = k_t G_t,
        dg_t = exp g_t * ((S_{t-1} * G_t) exp gv_t),  dgv_t = exp gv_t * (exp g_t (S_{t-1} * G_t)).

    `heads`: how many are computed at a time; by default all on a GPU, which has to be filled, and one on a CPU, whose
    cache has to hold the states.
    """
    B, _, H, K = inputs["q"].shape
    given = {name: x for name, x in inputs.items() if x is not None} | {f"d{name}": x for name, x in grads.items()}
    # As [B * H, ...], or with tokens as [T, B * H, ...].
    flat = {name: (x if name in STATES else x.movedim(1, 0)).double() for name, x in given.items()}
    flat = {name: x.flatten(0, 1) if name in STATES else x.flatten(1, 2) for name, x in flat.items()}
    flat |= {name: flat[name].exp() for name in ("g", "gv") if name in flat}
    flat["q"] = flat["q"] * K**-0.5
    heads = heads or (B * H if inputs["q"].is_cuda else 1)
    parts = [
        _of_heads({name: x[n : n + heads] if name in STATES else x[:, n : n + heads] for name, x in flat.items()})
        for n in range(0, B * H, heads)
    ]
    found = {name: torch.cat([part[name] for part in parts], 0 if name in STATES else 1) for name in parts[0]}
    found["dq"] = found["dq"] * K**-0.5
    return {
        name: x.unflatten(0, (B, H)) if name in STATES else x.unflatten(1, (B, H)).movedim(1, 0)
        for name, x in found.items()
        if name in grads or name.removeprefix("d") in given
    }


def _of_heads(x: Tensors) -> Tensors:
    """All outputs and gradients of some heads, with the scale in q, so that dq lacks it, and decays as g and gv."""
    states = {name: x[name] for name in x if name in STATES}
    tokens = {name: x[name].contiguous() for name in x if name not in STATES}
    of_state = states["dfinal"]
    state = states.get("initial", torch.zeros_like(of_state))
    starts = range(0, max(1, len(x["q"])), SEGMENT)
    segments = [{name: rows[start : start + SEGMENT] for name, rows in tokens.items()} for start in starts]
    before = []
    for segment in segments:
        before.append(state)
        state = _states(segment, _factors(segment), state)[-1].clone()
    parts = []
    for segment in reversed(segments):
        part, of_state = _of_segment(segment, before.pop(), of_state)
        parts.insert(0, part)
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return found | {"final": state, "dinitial": of_state}


def _states(x: Tensors, factors: list[torch.Tensor], start: torch.Tensor) -> torch.Tensor:
    """The state at the start, and S_t of every token."""
    states = start.new_empty(len(x["k"]) + 1, *start.shape)
    states[0] = start
    torch.mul(x["k"][..., None], x["v"][..., None, :], out=states[1:])
    _add_up(list(states), factors)
    return states


def _of_segment(x: Tensors, start: torch.Tensor, of_end: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Outputs and gradients of a segment's tokens, and the gradient of the state at its start."""
    factors = _factors(x)
    states = _states(x, factors, start)
    of_states = x["q"][..., None] * x["do"][..., None, :]
    of_states[-1:] += of_end
    _add_up(list(of_states)[::-1], factors[:0:-1])
    of_start = of_states[0] * factors[0] if factors else of_end
    a, b = x.get("g", torch.ones_like(x["k"])), x.get("gv", torch.ones_like(x["v"]))
    found = {
        "o": _rows(x["q"], states[1:]),
        "dq": _columns(states[1:], x["do"]),
        "dk": _columns(of_states, x["v"]),
        "dv": _rows(x["k"], of_states),
    }
    products = states[:-1].mul_(of_states)
    return found | {"dg": a * _columns(products, b), "dgv": b * _rows(a, products)}, of_start


def _factors(x: Tensors) -> list[torch.Tensor]:
    """By what each token multiplies the state, as far as it does."""
    factors = torch.ones_like(x["k"][:, :1, :1, None])
    factors = factors * x["g"][..., None] if "g" in x else factors
    factors = factors * x["gv"][..., None, :] if "gv" in x else factors
    return list(factors)


def _add_up(matrices: list[torch.Tensor], factors: list[torch.Tensor]) -> None:
    """Adds to every matrix but the first the one before it times the factor between them."""
    for before, matrix, factor in zip(matrices, matrices[1:], factors, strict=False):
        matrix.addcmul_(before, factor)


def _rows(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    return (x[..., None, :] @ matrices)[..., 0, :]


def _columns(matrices: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (matrices @ x[..., None])[..., 0]
