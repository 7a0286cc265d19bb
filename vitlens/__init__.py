"""vitlens: train or load a vision transformer, and explain what it computes.

The public functions are those that the commands call; each is imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from vitlens.version import __version__

if TYPE_CHECKING:
    from vitlens.analysis.ablation.importance import ablate as ablate
    from vitlens.analysis.attention.relevance import relevance as relevance
    from vitlens.analysis.attention.rollout import rollout as rollout
    from vitlens.analysis.attention.weights import attention as attention
    from vitlens.analysis.cost.profile import profile as profile
    from vitlens.analysis.evaluation.evaluate import evaluate as evaluate
    from vitlens.analysis.evaluation.evaluate import images as images
    from vitlens.analysis.failures.compare import compare as compare
    from vitlens.analysis.failures.compare import shape_bias as shape_bias
    from vitlens.analysis.failures.diagnosis import failures as failures
    from vitlens.analysis.features.features import features as features
    from vitlens.analysis.features.similarity import similarity as similarity
    from vitlens.analysis.features.zero_shot import zero_shot as zero_shot
    from vitlens.analysis.heads.statistics import Statistics as Statistics
    from vitlens.analysis.heads.statistics import statistics as statistics
    from vitlens.analysis.patching.public import direct_logit_attribution as direct_logit_attribution
    from vitlens.analysis.patching.public import logit_lens as logit_lens
    from vitlens.analysis.walkthrough.public import walkthrough as walkthrough
    from vitlens.attacks.attack import attack as attack
    from vitlens.attribution.choice import choose_method as choose_method
    from vitlens.attribution.explain import explain as explain
    from vitlens.attribution.look import look as look
    from vitlens.attribution.refinement import Refinement as Refinement
    from vitlens.commands.run.reading import read as read
    from vitlens.commands.shared.explorer_measure import attention_explorer as attention_explorer
    from vitlens.commands.shared.explorer_measure import explorer as explorer
    from vitlens.data.catalogue import load_data as load_data
    from vitlens.data.split import Split as Split
    from vitlens.lens.call import AttentionCall as AttentionCall
    from vitlens.lens.places.capture import capture as capture
    from vitlens.lens.places.changes import KnockOut as KnockOut
    from vitlens.lens.places.intervene import intervene as intervene
    from vitlens.lens.places.listing import places as places
    from vitlens.lens.places.patch import patch as patch
    from vitlens.lens.places.place import Place as Place
    from vitlens.lens.public import observe as observe
    from vitlens.lens.public import replay as replay
    from vitlens.lists import list_attacks as list_attacks
    from vitlens.lists import list_methods as list_methods
    from vitlens.lists import list_models as list_models
    from vitlens.lists import list_statistics as list_statistics
    from vitlens.models.loading import load as load
    from vitlens.models.model import Model as Model
    from vitlens.models.wrap import wrap as wrap
    from vitlens.notebook import show as show
    from vitlens.notebook import show_board as show_board
    from vitlens.notebook import show_heads as show_heads
    from vitlens.training.loop import fit as train

_HOMES = {
    "AttentionCall": ("vitlens.lens.call", "AttentionCall"),
    "KnockOut": ("vitlens.lens.places.changes", "KnockOut"),
    "Model": ("vitlens.models.model", "Model"),
    "Place": ("vitlens.lens.places.place", "Place"),
    "Refinement": ("vitlens.attribution.refinement", "Refinement"),
    "Split": ("vitlens.data.split", "Split"),
    "Statistics": ("vitlens.analysis.heads.statistics", "Statistics"),
    "ablate": ("vitlens.analysis.ablation.importance", "ablate"),
    "attack": ("vitlens.attacks.attack", "attack"),
    "attention": ("vitlens.analysis.attention.weights", "attention"),
    "attention_explorer": ("vitlens.commands.shared.explorer_measure", "attention_explorer"),
    "capture": ("vitlens.lens.places.capture", "capture"),
    "choose_method": ("vitlens.attribution.choice", "choose_method"),
    "compare": ("vitlens.analysis.failures.compare", "compare"),
    "direct_logit_attribution": ("vitlens.analysis.patching.public", "direct_logit_attribution"),
    "evaluate": ("vitlens.analysis.evaluation.evaluate", "evaluate"),
    "explain": ("vitlens.attribution.explain", "explain"),
    "explorer": ("vitlens.commands.shared.explorer_measure", "explorer"),
    "failures": ("vitlens.analysis.failures.diagnosis", "failures"),
    "features": ("vitlens.analysis.features.features", "features"),
    "images": ("vitlens.analysis.evaluation.evaluate", "images"),
    "intervene": ("vitlens.lens.places.intervene", "intervene"),
    "list_attacks": ("vitlens.lists", "list_attacks"),
    "list_methods": ("vitlens.lists", "list_methods"),
    "list_models": ("vitlens.lists", "list_models"),
    "list_statistics": ("vitlens.lists", "list_statistics"),
    "load": ("vitlens.models.loading", "load"),
    "load_data": ("vitlens.data.catalogue", "load_data"),
    "logit_lens": ("vitlens.analysis.patching.public", "logit_lens"),
    "look": ("vitlens.attribution.look", "look"),
    "observe": ("vitlens.lens.public", "observe"),
    "patch": ("vitlens.lens.places.patch", "patch"),
    "places": ("vitlens.lens.places.listing", "places"),
    "profile": ("vitlens.analysis.cost.profile", "profile"),
    "read": ("vitlens.commands.run.reading", "read"),
    "relevance": ("vitlens.analysis.attention.relevance", "relevance"),
    "replay": ("vitlens.lens.public", "replay"),
    "rollout": ("vitlens.analysis.attention.rollout", "rollout"),
    "shape_bias": ("vitlens.analysis.failures.compare", "shape_bias"),
    "show": ("vitlens.notebook", "show"),
    "show_board": ("vitlens.notebook", "show_board"),
    "show_heads": ("vitlens.notebook", "show_heads"),
    "similarity": ("vitlens.analysis.features.similarity", "similarity"),
    "statistics": ("vitlens.analysis.heads.statistics", "statistics"),
    "train": ("vitlens.training.loop", "fit"),
    "walkthrough": ("vitlens.analysis.walkthrough.public", "walkthrough"),
    "wrap": ("vitlens.models.wrap", "wrap"),
    "zero_shot": ("vitlens.analysis.features.zero_shot", "zero_shot"),
}

__all__ = [
    "AttentionCall",
    "KnockOut",
    "Model",
    "Place",
    "Refinement",
    "Split",
    "Statistics",
    "__version__",
    "ablate",
    "attack",
    "attention",
    "attention_explorer",
    "capture",
    "choose_method",
    "compare",
    "direct_logit_attribution",
    "evaluate",
    "explain",
    "explorer",
    "failures",
    "features",
    "images",
    "intervene",
    "list_attacks",
    "list_methods",
    "list_models",
    "list_statistics",
    "load",
    "load_data",
    "logit_lens",
    "look",
    "observe",
    "patch",
    "places",
    "profile",
    "read",
    "relevance",
    "replay",
    "rollout",
    "shape_bias",
    "show",
    "show_board",
    "show_heads",
    "similarity",
    "statistics",
    "train",
    "walkthrough",
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
