"""vitlens: train or load a vision transformer, and explain what it computes.

The public functions are those that the commands call; each is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from vitlens.version import __version__

if TYPE_CHECKING:
    from vitlens.analysis.ablation.ablate import ablate as ablate
    from vitlens.analysis.answers.evaluate import evaluate as evaluate
    from vitlens.analysis.answers.pictures import images as images
    from vitlens.analysis.attention.relevance import relevance as relevance
    from vitlens.analysis.attention.rollout import rollout as rollout
    from vitlens.analysis.attention.weights import attention as attention
    from vitlens.analysis.cost.profile import profile as profile
    from vitlens.analysis.failures.compare import compare as compare
    from vitlens.analysis.failures.shape_bias import shape_bias as shape_bias
    from vitlens.analysis.features.features import features as features
    from vitlens.analysis.features.similarity import similarity as similarity
    from vitlens.analysis.features.zero_shot import zero_shot as zero_shot
    from vitlens.analysis.heads.statistics import statistics as statistics
    from vitlens.attacks.attack import attack as attack
    from vitlens.attribution.explain import explain as explain
    from vitlens.models.loading import load as load
    from vitlens.models.model import Model as Model
    from vitlens.models.wrap import wrap as wrap
    from vitlens.training.loop import fit as train

_HOMES = {
    "Model": ("vitlens.models.model", "Model"),
    "ablate": ("vitlens.analysis.ablation.ablate", "ablate"),
    "attack": ("vitlens.attacks.attack", "attack"),
    "attention": ("vitlens.analysis.attention.weights", "attention"),
    "compare": ("vitlens.analysis.failures.compare", "compare"),
    "evaluate": ("vitlens.analysis.answers.evaluate", "evaluate"),
    "explain": ("vitlens.attribution.explain", "explain"),
    "features": ("vitlens.analysis.features.features", "features"),
    "images": ("vitlens.analysis.answers.pictures", "images"),
    "load": ("vitlens.models.loading", "load"),
    "profile": ("vitlens.analysis.cost.profile", "profile"),
    "relevance": ("vitlens.analysis.attention.relevance", "relevance"),
    "rollout": ("vitlens.analysis.attention.rollout", "rollout"),
    "shape_bias": ("vitlens.analysis.failures.shape_bias", "shape_bias"),
    "similarity": ("vitlens.analysis.features.similarity", "similarity"),
    "statistics": ("vitlens.analysis.heads.statistics", "statistics"),
    "train": ("vitlens.training.loop", "fit"),
    "wrap": ("vitlens.models.wrap", "wrap"),
    "zero_shot": ("vitlens.analysis.features.zero_shot", "zero_shot"),
}

__all__ = [
    "Model",
    "__version__",
    "ablate",
    "attack",
    "attention",
    "compare",
    "evaluate",
    "explain",
    "features",
    "images",
    "load",
    "profile",
    "relevance",
    "rollout",
    "shape_bias",
    "similarity",
    "statistics",
    "train",
    "wrap",
    "zero_shot",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitlens' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    module, word = _HOMES[name]
    value = getattr(import_module(module), word)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
