"""The parts of the script, in the order in which they are measured."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from benchmarks.gpu.session import Session


@dataclass(frozen=True)
class Part:
    """A part: `python -m benchmarks.gpu --part NAME`.

    title: of its table; module: whose function `run` measures it; seconds: after which it stops;
    apart: whether it is run only when it is named.
    """

    name: str
    title: str
    module: str
    seconds: float = 115.0
    apart: bool = False

    @property
    def run(self) -> "Callable[[Session], None]":
        """Return what measures it."""
        function: Callable[[Session], None] = import_module(self.module).run
        return function


_PARTS: Final = (
    Part("ablation", "Exact ablation of every head by replay", "benchmarks.gpu.ablation"),
    Part(
        "observation",
        "Observation, rollout, relevance and the recommended map",
        "benchmarks.gpu.observation",
    ),
    Part("attacks", "PGD-20 and C&W sweeps", "benchmarks.gpu.attacks"),
    Part("features", "Features and k-NN of 50,000 images", "benchmarks.gpu.features"),
    Part("profile", "Where the time goes", "benchmarks.gpu.profile"),
    Part("train", "Training on CIFAR-10 (JPEG)", "benchmarks.gpu.train", seconds=540.0, apart=True),
)
PARTS: Final = {part.name: part for part in _PARTS}
