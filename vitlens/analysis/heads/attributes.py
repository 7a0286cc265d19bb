"""The attributes of `vitlens.Statistics`, written out so that editors complete them and mypy knows them.

They are those of the registry, in its order (tests/public/test_python.py compares them, and says what to write).
"""

from jaxtyping import Float
from torch import Tensor

PerHead = Float[Tensor, "layers heads"]


class StatisticAttributes:
    """One attribute for each registered statistic: a mean over images, float64, NaN where it is not defined."""

    distance: PerHead
    """(layers, heads), px: mean distance from a patch to the patches that it attends to."""
    entropy: PerHead
    """(layers, heads), nats: spread of a row over all keys, ln(keys) when uniform."""
    normalised_entropy: PerHead
    """(layers, heads), fraction: entropy over that of uniform attention."""
    effective_keys: PerHead
    """(layers, heads), keys: exp of the entropy, a mean over rows."""
    hoyer: PerHead
    """(layers, heads), fraction: 0 for uniform attention, 1 for a single key."""
    gini: PerHead
    """(layers, heads), fraction: inequality of a row's weights, 0 for uniform attention."""
    self_mass: PerHead
    """(layers, heads), fraction: attention of a patch on its own token."""
    neighbour_mass: PerHead
    """(layers, heads), fraction: attention on the four adjacent patches."""
    cls_mass: PerHead
    """(layers, heads), fraction: attention of patches on the CLS token."""
    register_mass: PerHead
    """(layers, heads), fraction: attention of patches on registers and distillation token."""
    prefix_mass: PerHead
    """(layers, heads), fraction: attention of patches on all tokens before the patches."""
    sinks: PerHead
    """(layers, heads), keys: keys that receive more than median + 5 median absolute deviations."""
    sink_mass: PerHead
    """(layers, heads), fraction: attention of patches that lies on those keys."""
    energy: PerHead
    """(layers, heads), no unit: sum of a patch row's squared weights on patches."""
    cls_entropy: PerHead
    """(layers, heads), nats: spread of a row over all keys, ln(keys) when uniform; the row of CLS."""
    cls_normalised_entropy: PerHead
    """(layers, heads), fraction: entropy over that of uniform attention; the row of CLS."""
    cls_effective_keys: PerHead
    """(layers, heads), keys: exp of the entropy, a mean over rows; the row of CLS."""
    cls_hoyer: PerHead
    """(layers, heads), fraction: 0 for uniform attention, 1 for a single key; the row of CLS."""
    cls_gini: PerHead
    """(layers, heads), fraction: inequality of a row's weights, 0 for uniform attention; the row of CLS."""
    cls_self_mass: PerHead
    """(layers, heads), fraction: attention of the CLS token on itself."""
    cls_register_mass: PerHead
    """(layers, heads), fraction: attention of the CLS token on registers and distillation token."""
    token_norm: PerHead
    """(layers, 1), no unit: Euclidean norm of a token after the block, the median of an image."""
    greatest_norm: PerHead
    """(layers, 1), no unit: the largest norm of a token of an image."""
    high_norm_patches: PerHead
    """(layers, 1), tokens: patches with a norm above median + 5 median absolute deviations."""
    high_norm_prefix: PerHead
    """(layers, 1), tokens: CLS and registers with a norm above that."""
