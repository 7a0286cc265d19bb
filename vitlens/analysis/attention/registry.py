"""Registry of the attention methods, which map attention to the image; free of torch.

To add one, write its function, from a chain and settings to maps, and one entry here. `vitlens
rollout`, its report and the tests take it from here. An entry of vitlens/attribution/registry.py
with its name makes it an attribution as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from vitlens.errors import InputError, UnknownNameError, argument
from vitlens.names import FUSIONS, Fusion

ALPHA: Final = 0.5  # share of the identity in rollout's (1 - alpha) A + alpha I
# the explorer has every head for so many images, and the mean over heads for the others
WHOLE: Final = 4
REFINE_STEPS: Final = 2  # steps of refinement by attention between patches; even, see affinity.py
_WITH_WEIGHTS: Final = 2.0  # cost, in forward passes, of a pass that computes all attention weights


@dataclass(frozen=True)
class AttentionMethod:
    """One attention method.

    name: the name under which it is called.
    title: its name in figures and tables.
    description: a description of its maps, in a sentence.
    paper: the paper that defines it.
    function: "module:function". It takes a chain (chain.py) and the options by name, and returns
        maps.
    needs: "chain" if the method goes through all layers (see require_chain), "maps" if it needs
        only the map of a layer (see require_maps).
    forwards, backwards: the approximate number of passes of the model for an image. With backward
        passes, the chain has gradients, and the maps are those of a target class.
    options: the `MethodSettings` that the function takes.
    check: "module:function". It takes a model, and raises an error if the method cannot run on it
        although `needs` is met. None without such a check.
    default: True if `vitlens rollout` runs it by default.
    rules: the rules of the backward pass, plain gradients or LibraGrad's.
    """

    name: str
    title: str
    description: str
    paper: str
    function: str
    needs: Literal["chain", "maps"]
    forwards: int | float
    backwards: int | float
    options: tuple[str, ...]
    check: str | None = None
    default: bool = False
    rules: Literal["plain", "libra"] = "plain"

    @property
    def gradients(self) -> bool:
        """Return True if it needs gradients, and so a target class."""
        return self.backwards > 0


_METHODS: Final = "vitlens.analysis.attention.methods"
_ENTRIES: Final = (
    AttentionMethod(
        name="rollout",
        title="rollout",
        description="attention propagated through all layers; the same for every class",
        paper="Abnar & Zuidema 2020",
        function=f"{_METHODS}:rollout_maps",
        needs="chain",
        forwards=_WITH_WEIGHTS,
        backwards=0,
        options=("fusion", "discard", "alpha", "start_layer"),
        default=True,
    ),
    AttentionMethod(
        name="relevance",
        title="relevance",
        description="attention that raises the target's logit, propagated through all layers "
        "(Chefer 2021)",
        paper="Chefer 2021, generic attention explainability",
        function=f"{_METHODS}:relevance_maps",
        needs="chain",
        forwards=0,
        backwards=1.5,
        options=("start_layer",),
        default=True,
    ),
    AttentionMethod(
        name="libra-relevance",
        title="Libra relevance",
        description="relevance with LibraGrad's gradients, which count attention, norms and "
        "activations once",
        paper="Mehri 2025 (LibraGrad) with Chefer 2021's rule",
        function=f"{_METHODS}:relevance_maps",
        needs="chain",
        forwards=0,
        backwards=1.5,
        options=("start_layer",),
        rules="libra",
    ),
    AttentionMethod(
        name="gradient-rollout",
        title="gradient-weighted rollout",
        description="rollout of the attention that raises the target's logit",
        paper="Abnar & Zuidema 2020 with Chefer 2021's weights",
        function=f"{_METHODS}:gradient_rollout_maps",
        needs="chain",
        forwards=0,
        backwards=1.5,
        options=("alpha", "start_layer"),
    ),
    AttentionMethod(
        name="attention",
        title="attention of the last layer",
        description="the mean of one layer's heads, the last by default",
        paper="the model's own weights",
        function="vitlens.analysis.attention.weights:layer_maps",
        needs="maps",
        forwards=_WITH_WEIGHTS,
        backwards=0,
        options=("layer",),
    ),
    AttentionMethod(
        name="flow",
        title="attention flow",
        description="the maximum flow from the readout to each patch (only for few tokens)",
        paper="Abnar & Zuidema 2020, section 3",
        function=f"{_METHODS}:flow_maps",
        needs="chain",
        forwards=_WITH_WEIGHTS,
        backwards=0,
        options=("alpha",),
        check=f"{_METHODS}:require_flow",
    ),
)

ATTENTION_METHODS: Final[Mapping[str, AttentionMethod]] = MappingProxyType(
    {entry.name: entry for entry in _ENTRIES}
)


def attention_method(name: str) -> AttentionMethod:
    """Return the attention method of this name.

    Raises UnknownNameError, which lists all names.
    """
    if name not in ATTENTION_METHODS:
        raise UnknownNameError("method", name, ATTENTION_METHODS)
    return ATTENTION_METHODS[name]


@dataclass(frozen=True)
class MethodSettings:
    """A method with its settings; settings that the method does not use are ignored.

    Layers are numbered from 0.

    method: a name of ATTENTION_METHODS.
    fusion: the fusion of heads in rollout.
    discard: the fraction of each query row that rollout sets to zero, the lowest weights. The CLS
        column is kept.
    alpha: the weight of the identity in rollout, gradient-weighted rollout and flow.
    start_layer: the first layer of the chain.
    layer: the layer of the method "attention" (None: the last).

    Raises UnknownNameError and InputError.
    """

    method: str
    fusion: Fusion = "mean"
    discard: float = 0.0
    alpha: float = ALPHA
    start_layer: int = 0
    layer: int | None = None

    def __post_init__(self) -> None:
        attention_method(self.method)
        if self.fusion not in FUSIONS:
            raise UnknownNameError("fusion", self.fusion, FUSIONS)
        if not 0 <= self.discard < 1:
            raise InputError(f"expected {argument('discard')} in [0, 1), found {self.discard}")
        if not 0 <= self.alpha <= 1:
            raise InputError(f"expected {argument('alpha')} in [0, 1], found {self.alpha}")

    @property
    def name(self) -> str:
        """Return its name in reports and metrics: "rollout-mean", "relevance", "attention" ..."""
        if "fusion" in attention_method(self.method).options:
            return f"{self.method}-{self.fusion}"
        return self.method

    @property
    def settings(self) -> dict[str, object]:
        """Return the settings that the method uses."""
        return {name: getattr(self, name) for name in attention_method(self.method).options}
