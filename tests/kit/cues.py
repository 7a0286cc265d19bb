"""All cues, the heads that carry a cue, the maps that show it, and the cue that is traced."""

from vitlens.analysis.reliance.cues import CUES
from vitlens.analysis.reliance.heads import find_cue_heads
from vitlens.analysis.reliance.maps import judge_cue_maps
from vitlens.analysis.reliance.measure import ChangedImages
from vitlens.analysis.reliance.rows import suspects

__all__ = ["CUES", "ChangedImages", "find_cue_heads", "judge_cue_maps", "suspects"]
