"""A whole study, or a controlled comparison of small models."""

from pathlib import Path

from vitlens.commands.study.measure.points import measure_points
from vitlens.commands.study.measure.whole import measure_whole
from vitlens.commands.study.options import WHOLE, StudyOptions
from vitlens.errors import InputError

__all__ = ["measure"]


def measure(options: StudyOptions) -> Path:
    """Train the presets, evaluate all models and analyse the ViTs; or train the points of one --kind.

    Returns the report's path. Raises UnsupportedError where none of the models can be analysed.
    """
    if options.resume is not None or options.kind not in (None, WHOLE):
        if options.images or options.predicted:
            option = f"--kind {options.kind}" if options.kind else "--resume"
            raise InputError(
                f"expected --data with {option}, which trains its models on labels, found "
                f"{'--images' if options.images else '--predicted'}; leave it out"
            )
        return measure_points(options)
    if options.seeds is not None:
        raise InputError(f"expected --kind with --seeds {options.seeds}, found a whole study; try --kind architecture")
    return measure_whole(options)
