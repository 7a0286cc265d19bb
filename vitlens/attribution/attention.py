"""Attention methods as attributions: rollout, relevance and the others of analysis/attention/registry.py."""

from vitlens.analysis.attention.methods import Way, trace
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels, Maps


def attention_maps(model: Model, images: Images, targets: Labels, *, method: str) -> Maps:
    """The maps of an attention method with its default settings; one without gradients leaves the targets aside."""
    return trace(model, images, [Way(method)], targets=targets).maps[0]
