"""`vitlens stats --animate`: the statistics over training as a film, through matplotlib's writers."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.animation import AbstractMovieWriter, FFMpegWriter, PillowWriter

from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.errors import InputError
from vitlens.figures.stats.film import learning_film
from vitlens.files import RunRecord, write_atomically
from vitlens.names import AnimationFormat
from vitlens.places import inside
from vitlens.runs.stats_learning import ARRAYS, near

PLACE = "animations/learning.{form}"
_PANELS = 2  # of statistics
_DOTS_PER_INCH = 110
_SECONDS = 12.0  # that a film takes, if that is neither too slow nor too quick
_RATES = (2, 8)  # frames a second


def require_writer(form: AnimationFormat | None) -> None:
    """Raise InputError, with what to type, where the film could not be written."""
    if form == "mp4" and not FFMpegWriter.isAvailable():
        raise InputError("expected ffmpeg for --animate mp4, found none on the PATH; install it, or --animate gif")


def write_film(record: RunRecord, form: AnimationFormat) -> Path:
    """Film what lies in the run's arrays; returns the file, in animations/."""
    found: Any = record.arrays(ARRAYS)
    models: Any = record.config["models"]
    shown = [name for name in shown_in("training") if name in found][:_PANELS]
    film = learning_film(
        epochs=[int(epoch) for epoch in found["epochs"]],
        values={STATISTICS[name].label: found[name] for name in shown},
        similarity=near(found["similarity"]) if "similarity" in found else None,
        name=str(models[0]["alias"]),
    )
    rate = int(min(max(film.frames / _SECONDS, _RATES[0]), _RATES[1]))
    path = inside(record.folder, PLACE.format(form=form))
    with write_atomically(path) as temporary, matplotlib.rc_context({"savefig.bbox": None}):
        writer = _writer(form, rate)
        with writer.saving(film.figure, str(temporary), _DOTS_PER_INCH):
            # the last moment stays for a second
            for frame in [*range(film.frames), *[film.frames - 1] * (rate - 1)]:
                film.show(frame)
                writer.grab_frame()
    return path


def _writer(form: AnimationFormat, rate: int) -> AbstractMovieWriter:
    return PillowWriter(fps=rate) if form == "gif" else FFMpegWriter(fps=rate, codec="h264")
