"""The backends that come with glabench."""

from glabench.backends.base import Backend
from glabench.backends.fla import FlaGla, FlaLinear
from glabench.backends.flash import FlashAttn, SdpaCudnn, SdpaFlash, SdpaMath
from glabench.backends.gla import GlaRecurrentTorch, GlaTorch, GlaTriton, LinearTorch, LinearTriton
from glabench.backends.mamba import Mamba1, Mamba2
from glabench.backends.papers.backends import GlaParallelNaive, GlaParallelTorch, GlaScanTorch, LinearParallelTorch

BACKENDS: list[Backend] = [
    GlaTriton(),
    LinearTriton(),
    GlaTorch(),
    GlaRecurrentTorch(),
    LinearTorch(),
    FlaGla(),
    FlaLinear(),
    SdpaFlash(),
    SdpaCudnn(),
    SdpaMath(),
    FlashAttn(),
    Mamba1(),
    Mamba2(),
    LinearParallelTorch(),
    GlaParallelTorch(),
    GlaParallelNaive(),
    GlaScanTorch(),
]
