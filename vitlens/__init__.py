"""vitlens: train or load a vision transformer, and turn it inside out.

The public functions are those that the commands call; each is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from vitlens.version import __version__

if TYPE_CHECKING:
    from vitlens.analysis.ablate import ablate as ablate
    from vitlens.analysis.attention import attention as attention
    from vitlens.analysis.compare import compare as compare
    from vitlens.analysis.evaluate import evaluate as evaluate
    from vitlens.analysis.features import features as features
    from vitlens.analysis.pictures import images as images
    from vitlens.analysis.profile import profile as profile
    from vitlens.analysis.relevance import relevance as relevance
    from vitlens.analysis.rollout import rollout as rollout
    from vitlens.analysis.shape_bias import shape_bias as shape_bias
    from vitlens.analysis.similarity import similarity as similarity
    from vitlens.analysis.stats import statistics as statistics
    from vitlens.analysis.zero_shot import zero_shot as zero_shot
    from vitlens.attacks.attack import attack as attack
    from vitlens.attribution.registry import explain as explain
    from vitlens.models.specimen import Specimen as Specimen
    from vitlens.models.zoo import load as load
    from vitlens.training.loop import fit as train

_HOMES = {
    "Specimen": ("vitlens.models.specimen", "Specimen"),
    "ablate": ("vitlens.analysis.ablate", "ablate"),
    "attack": ("vitlens.attacks.attack", "attack"),
    "attention": ("vitlens.analysis.attention", "attention"),
    "compare": ("vitlens.analysis.compare", "compare"),
    "evaluate": ("vitlens.analysis.evaluate", "evaluate"),
    "explain": ("vitlens.attribution.registry", "explain"),
    "features": ("vitlens.analysis.features", "features"),
    "images": ("vitlens.analysis.pictures", "images"),
    "load": ("vitlens.models.zoo", "load"),
    "profile": ("vitlens.analysis.profile", "profile"),
    "relevance": ("vitlens.analysis.relevance", "relevance"),
    "rollout": ("vitlens.analysis.rollout", "rollout"),
    "shape_bias": ("vitlens.analysis.shape_bias", "shape_bias"),
    "similarity": ("vitlens.analysis.similarity", "similarity"),
    "statistics": ("vitlens.analysis.stats", "statistics"),
    "train": ("vitlens.training.loop", "fit"),
    "zero_shot": ("vitlens.analysis.zero_shot", "zero_shot"),
}

__all__ = [
    "Specimen",
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
    "zero_shot",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitlens' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    module, word = _HOMES[name]
    globals()[name] = found = getattr(import_module(module), word)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
