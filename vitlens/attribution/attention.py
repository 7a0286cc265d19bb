"""Attention methods as attributions: rollout, relevance and the others of analysis/attention/methods.py."""

from collections.abc import Callable

from vitlens.analysis.attention.methods import Way, trace
from vitlens.models.model import Model
from vitlens.names import AttentionMethod
from vitlens.shapes import Images, Labels, Maps


def followed(method: AttentionMethod) -> Callable[[Model, Images, Labels], Maps]:
    """A method of METHODS with its default settings; those that know no class leave the targets aside."""

    def maps(model: Model, images: Images, targets: Labels) -> Maps:
        return trace(model, images, [Way(method)], targets=targets).maps[0]

    return maps
