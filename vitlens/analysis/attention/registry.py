"""Registry of the attention methods, which map attention to the image; free of torch.

To add one, write its function, from a chain and settings to maps, and one entry here: `vitlens
rollout`, its report and the tests take it from there. An entry of vitlens/attribution/registry.py
that names it makes it an attribution as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from vitlens.errors import InputError, UnknownNameError, argument
from vitlens.names import FUSIONS, Fusion

ALPHA: Final = 0.5  # share of the identity in rollout's (1 - alpha) A + alpha I
# images of which a viewer has every head; of further ones it has the mean over heads
WHOLE: Final = 4
REFINE_STEPS: Final = 2  # of a map's refinement by attention between patches; even, see affinity.py
_WITH_WEIGHTS: Final = 2.0  # cost, in forward passes, of a pass that computes all attention weights


@dataclass(frozen=True)
class AttentionMethod:
    """One attention method.

    title: in figures and tables.
    description: the description of its maps, in a sentence.
    paper: that defines it.
    function: "module:function" that takes a chain (chain.py) and the options by name, and returns
        maps.
    needs: the requirements of the model (require_chain, require_maps), "chain" where the method
        goes through all layers.
    forwards, backwards: about how many passes of the model an image takes; with backward passes the
        chain has gradients, and the maps are those of a target class.
    options: the `MethodSettings` that the function takes.
    check: "module:function" of a model that raises where the method cannot run although `needs` is
        met.
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
        "rollout",
        "rollout",
        "attention propagated through all layers; the same for every class",
        "Abnar & Zuidema 2020",
        f"{_METHODS}:rollout_maps",
        "chain",
        _WITH_WEIGHTS,
        0,
        ("fusion", "discard", "alpha", "start_layer"),
        default=True,
    ),
    AttentionMethod(
        "relevance",
        "relevance",
        "attention that raises the target's logit, propagated through all layers (Chefer 2021)",
        "Chefer 2021, generic attention explainability",
        f"{_METHODS}:relevance_maps",
        "chain",
        0,
        1.5,
        ("start_layer",),
        default=True,
    ),
    AttentionMethod(
        "libra-relevance",
        "Libra relevance",
        "relevance with LibraGrad's gradients, which count attention, norms and activations once",
        "Mehri 2025 (LibraGrad) with Chefer 2021's rule",
        f"{_METHODS}:relevance_maps",
        "chain",
        0,
        1.5,
        ("start_layer",),
        rules="libra",
    ),
    AttentionMethod(
        "gradient-rollout",
        "gradient-weighted rollout",
        "rollout of the attention that raises the target's logit",
        "Abnar & Zuidema 2020 with Chefer 2021's weights",
        f"{_METHODS}:gradient_rollout_maps",
        "chain",
        0,
        1.5,
        ("alpha", "start_layer"),
    ),
    AttentionMethod(
        "attention",
        "attention of the last layer",
        "the mean of one layer's heads, the last by default",
        "the model's own weights",
        "vitlens.analysis.attention.weights:layer_maps",
        "maps",
        _WITH_WEIGHTS,
        0,
        ("layer",),
    ),
    AttentionMethod(
        "flow",
        "attention flow",
        "the maximum flow from the readout to each patch (only for few tokens)",
        "Abnar & Zuidema 2020, section 3",
        f"{_METHODS}:flow_maps",
        "chain",
        _WITH_WEIGHTS,
        0,
        ("alpha",),
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

    method: a name of ATTENTION_METHODS.
    fusion: the fusion of the heads in rollout.
    discard: lowest fraction of each query row that rollout sets to zero (CLS column kept).
    alpha: weight of the identity in rollout, gradient-weighted rollout and flow.
    start_layer: first layer of the chain.
    layer: that of the method "attention" (None: the last).

    All layers count from 0. Raises UnknownNameError and InputError.
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
