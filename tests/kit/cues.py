"""What tests of traced cues use: the heads that carry a cue, the maps that show it, and which cue is traced."""

from vitlens.analysis.reliance.heads import find_cue_heads
from vitlens.analysis.reliance.maps import judge_cue_maps
from vitlens.analysis.reliance.rows import suspects

__all__ = ["find_cue_heads", "judge_cue_maps", "suspects"]
