"""Models that go on: a prefix, then token by token, is what all tokens at once are; states stay where they are."""

import pytest
import torch
from small_models import REGISTRY, SMALL, VOCABULARY, WIDTH, model_of, tokens_of

from glabench.errors import UsageError
from glabench.models import MIXERS, LanguageModel, ModelConfig
from glabench.models.kernels import Kernel
from glabench.models.parts import CausalConv
from glabench.models.softmax import attend_to_cache
from glabench.models.states import Place

pytestmark = pytest.mark.usefixtures("one_thread")
KERNELS = [
    ("gla", "gla-torch"),
    ("gla", "gla-recurrent-torch"),
    ("linear", "linear-torch"),
    ("transformer", "sdpa-math"),
]


def decoded(model, tokens, prefix, room=48):
    """The logits after the prefix and after each later token, [B, 1 + steps, vocabulary], and the states."""
    states = model.make_states(len(tokens), room)
    logits = [model.prefill(tokens[:, :prefix], states)]
    logits += [model.decode(tokens[:, at : at + 1], states) for at in range(prefix, tokens.shape[1])]
    return torch.stack(logits, 1), states


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("prefix", [1, 2, 20])
@pytest.mark.parametrize(("mixer", "kernel"), [*((mixer, "reference") for mixer in MIXERS), *KERNELS])
def test_a_prefix_and_single_tokens_give_the_logits_of_all_tokens_at_once(mixer, kernel, prefix):
    model, tokens = model_of(mixer, kernel, layers=2), tokens_of(2, 30)
    with torch.no_grad():
        found, states = decoded(model, tokens, prefix)
        assert error(found, model(tokens)[:, prefix - 1 :]) < 1e-9
    assert states.place.tolist() == [30, 30]


@pytest.mark.parametrize("mixer", MIXERS)
def test_in_half_precision_states_have_their_rounding_and_no_more(mixer):
    model, tokens = model_of(mixer, layers=2).bfloat16(), tokens_of(2, 30)
    with torch.no_grad():
        found, states = decoded(model, tokens, 20)
        assert 1e-4 < error(found, model.double()(tokens)[:, 19:]) < 2e-2
    if mixer != "hyena":  # which keeps inputs alone
        assert all(layer.fixed[0].dtype == torch.float32 for layer in states.layers if layer.fixed)


@pytest.mark.parametrize("mixer", MIXERS)
def test_states_stay_in_their_place_in_memory_and_a_prefix_begins_anew(mixer):
    model, tokens = model_of(mixer, layers=2), tokens_of(2, 24)
    with torch.no_grad():
        first, states = decoded(model, tokens, 20)
        tensors = [states.place, *(x for layer in states.layers for x in (*layer.fixed, *layer.caches))]
        before = [x.data_ptr() for x in tensors]
        again = model.prefill(tokens[:, :20], states)
        after = model.decode(tokens[:, 20:21], states)
    assert torch.equal(again, first[:, 0])
    assert torch.equal(after, first[:, 1])
    assert [x.data_ptr() for x in tensors] == before
    assert states.place.tolist() == [21, 21]


# Bytes per sequence of one layer in float32: two heads of 8 times 16; 64 channels of 4 states and 4 tokens; 4 heads of
# 16 times 8, and 4 tokens of 80 channels; 3 numbers of 32 channels, and a token of 32.
MATRICES = ("gla", "linear", "simple-gla", "fixed-gate", "gla-values", "gla-both", "retnet")
BYTES = dict.fromkeys(MATRICES, 1024) | {"mamba1": 2 * 1024, "mamba2": 2048 + 1280, "rwkv4": 512}

# Of a token, and besides: keys and values of two heads of 16; 32 products, and two tokens of 96 channels.
CACHED = {"transformer": (256, 0), "hyena": (128, 768)}


@pytest.mark.parametrize("mixer", MIXERS)
def test_what_a_sequence_needs_and_what_is_there_for_it_are_counted(mixer):
    model = model_of(mixer, dtype=torch.float32)
    states, blocks = model.make_states(3, 48), len(model.blocks)
    if mixer in CACHED:
        token, fixed = CACHED[mixer]
        expected = (20 * token + fixed, 48 * token + fixed, fixed)
        assert (states.needed_bytes(20), states.allocated_bytes, states.fixed_bytes) == expected
    else:
        expected = blocks * BYTES[mixer]
        assert (states.needed_bytes(20), states.allocated_bytes, states.fixed_bytes) == (expected,) * 3


def test_a_prefix_beyond_the_room_is_refused():
    model = model_of("transformer")
    with pytest.raises(UsageError, match=r"9 tokens: there is room for 8; make states with more room"):
        model.prefill(tokens_of(1, 9), model.make_states(1, 8))


def test_sequences_of_one_batch_may_be_at_different_places():
    model, tokens = model_of("transformer", layers=2), tokens_of(2, 12)
    with torch.no_grad():
        states = model.make_states(2, 16)
        model.prefill(tokens[:, :9], states)
        states.place.copy_(torch.tensor([9, 5]))
        found = model.decode(torch.stack((tokens[0, 9:10], tokens[1, 5:6])), states)
        assert error(found[0], model(tokens[:1, :10])[0, -1]) < 1e-9
        assert error(found[1], model(tokens[1:, :6])[0, -1]) < 1e-9


def test_attention_does_not_read_what_is_behind_a_token():
    q, k, v = torch.randn(3, 2, 1, 2, 16, dtype=torch.float64)
    keys, values = torch.full((2, 2, 8, 2, 16), 1e6, dtype=torch.float64)
    o = attend_to_cache(q, k, v, keys, values, Place(torch.zeros(2, dtype=torch.int32)))
    torch.testing.assert_close(o, v)
    assert torch.equal(keys[:, 0], k[:, 0])
    assert (values[:, 1:] == 1e6).all()


def test_a_convolution_token_by_token_is_that_of_all():
    conv, x = CausalConv(6).double(), torch.randn(2, 6, 9, dtype=torch.float64)
    for first in (1, 2, 3, 4, 5):
        tail = conv.make_tail(2)
        conv.keep_tail(x[..., :first], tail)
        with torch.no_grad():
            found = torch.cat([conv.step(x[..., at : at + 1], tail) for at in range(first, 9)], -1)
            torch.testing.assert_close(found, conv(x)[..., first:])


def test_a_kernel_without_states_is_named():
    kernel = Kernel(REGISTRY, "gla", "gla-scan-torch", {"heads": 2, "key_dim": 8, "value_dim": 16})
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(UsageError, match="kernel: gla-scan-torch: returns no states"):
        kernel.with_states({"q": x, "k": x, "v": torch.zeros(1, 4, 2, 16), "g": x}, 1, 4)


def test_all_of_it_is_made_without_memory():
    config = ModelConfig("transformer", WIDTH, 2, VOCABULARY, sizes=SMALL["transformer"])
    with torch.device("meta"):
        states = LanguageModel(config, REGISTRY).make_states(4, 2**20)
    assert states.allocated_bytes == 2**20 * 2 * 256
