"""Attention followed to the image, as attributions: rollout, relevance and their kin of analysis/methods.py."""

from collections.abc import Callable

from vitlens.analysis.methods import Way, trace
from vitlens.models.specimen import Specimen
from vitlens.names import AttentionMethod
from vitlens.shapes import Images, Labels, Maps


def followed(method: AttentionMethod) -> Callable[[Specimen, Images, Labels], Maps]:
    """A method of METHODS with its default settings; those that know no class leave the targets aside."""

    def maps(specimen: Specimen, images: Images, targets: Labels) -> Maps:
        return trace(specimen, images, [Way(method)], targets=targets).maps[0]

    return maps
