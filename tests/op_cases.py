"""Small cells of every op."""

from glabench import ops
from glabench.sweeps import Cell, Parameters

# Models have no reference of their own: see test_training.py, test_recall.py, test_text.py and test_decoding.py.
OPS = {op.name: op for op in ops.BUILTIN if op not in (ops.TRAINING, ops.RECALL, ops.TEXT, ops.DECODING)}
HEADS = {"heads": 3, "key_dim": 16, "value_dim": 32}
SIZES = {
    "gla": HEADS | {"gate": "resets"},
    "linear": HEADS,
    "softmax": {"heads": 3, "head_dim": 16},
    "mamba1": {"inner": 6, "state_size": 4},
    "mamba2": {"heads": 3, "head_dim": 8, "state_size": 4},
    "simple-gla": HEADS | {"gate": "resets"},
    "retention": HEADS,
    "lightning": HEADS,
    "gla-both": HEADS | {"gate": "resets"},
    "gla-values": HEADS | {"gate": "resets"},
    "gated-delta": HEADS | {"gate": "resets"},
    "kda": HEADS | {"gate": "resets"},
    "mlstm": HEADS,
    "hyena": {"inner": 6},
    "rwkv4": {"inner": 6},
}


def cell_of(op, pass_="fwd", dtype="fp64", **changes):
    return Cell("any", op, pass_, 2, 8, dtype, Parameters(SIZES[op] | changes), "cpu")
