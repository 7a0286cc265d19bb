"""How many images `vitlens compare` passes through a model, counted from what was asked for."""

from collections.abc import Iterator

from vitlens.analysis.attention.registry import WITH_WEIGHTS
from vitlens.attribution.registry import ATTRIBUTIONS
from vitlens.commands.scaffold.expected import Part


def compare_parts(
    method: str, images: int, *, mapped: int, watched: int, hardened: int, attentive: bool
) -> Iterator[Part]:
    """One model's share of a comparison. mapped: images with maps; watched: images whose attention is measured;
    hardened: images shown on all levels of all disturbances; attentive: whether the model has attention."""
    cost = ATTRIBUTIONS[method]
    yield Part("answers", images)
    yield Part("maps", cost.forwards * mapped, cost.backwards * mapped, "a smaller --maps")
    if attentive:
        yield Part("attention", WITH_WEIGHTS * watched)
    if hardened:
        yield Part("harder images", hardened, 0.0, "--no-harder")
