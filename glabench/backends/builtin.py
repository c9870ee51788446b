"""The backends that come with glabench."""

from glabench.backends.base import Backend
from glabench.backends.fla import (
    FlaGatedDelta,
    FlaGla,
    FlaGlaRecurrent,
    FlaKda,
    FlaLightning,
    FlaLinear,
    FlaRetention,
    FlaSimpleGla,
)  # fmt: skip
from glabench.backends.flash import FlashAttn, FlashAttn3, FlashAttn4
from glabench.backends.gla import (
    GlaBothTriton,
    GlaRecurrentTorch,
    GlaTorch,
    GlaTorchCompiled,
    GlaTorchHalf,
    GlaTriton,
    GlaValuesTriton,
    LightningTriton,
    LinearTorch,
    LinearTriton,
    RetentionTriton,
    SimpleGlaTriton,
)  # fmt: skip
from glabench.backends.mamba import Mamba1, Mamba2
from glabench.backends.mlstm import MlstmKernels
from glabench.backends.papers.backends import (
    GlaBothStoredStates,
    GlaFiveStep,
    GlaParallelNaive,
    GlaParallelTorch,
    GlaScanTorch,
    GlaStoredStates,
    GlaTwoLevel,
    LinearParallelTorch,
    LinearTwoPass,
)  # fmt: skip
from glabench.backends.sdpa import Flex, SdpaCudnn, SdpaFlash, SdpaMath

BACKENDS: list[Backend] = [
    GlaTriton(),
    LinearTriton(),
    SimpleGlaTriton(),
    RetentionTriton(),
    LightningTriton(),
    GlaBothTriton(),
    GlaValuesTriton(),
    GlaTorch(),
    GlaTorchHalf(),
    GlaTorchCompiled(),
    GlaRecurrentTorch(),
    LinearTorch(),
    FlaGla(),
    FlaLinear(),
    SdpaFlash(),
    SdpaCudnn(),
    SdpaMath(),
    Flex(),
    FlashAttn(),
    FlashAttn3(),
    FlashAttn4(),
    Mamba1(),
    Mamba2(),
    FlaGlaRecurrent(),
    FlaSimpleGla(),
    FlaRetention(),
    FlaLightning(),
    FlaGatedDelta(),
    FlaKda(),
    MlstmKernels(),
    LinearParallelTorch(),
    GlaParallelTorch(),
    GlaParallelNaive(),
    GlaScanTorch(),
    GlaTwoLevel(),
    LinearTwoPass(),
    GlaStoredStates(),
    GlaBothStoredStates(),
    GlaFiveStep(),
]
