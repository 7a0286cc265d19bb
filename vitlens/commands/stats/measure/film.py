"""`vitlens stats --animate`: the statistics over training as a film, through matplotlib's writers."""

from typing import Final

import matplotlib
from matplotlib.animation import AbstractMovieWriter, FFMpegWriter, PillowWriter

from vitlens.analysis.heads.registry import STATISTICS, shown_in
from vitlens.commands.scaffold.folder import RunFolder
from vitlens.commands.stats.record import FILM, TrainingArrays
from vitlens.errors import InputError
from vitlens.figures.stats.film import learning_film
from vitlens.figures.stats.training import near_offsets
from vitlens.files import write_atomically
from vitlens.names import AnimationFormat

_PANELS: Final = 2  # of statistics
_DOTS_PER_INCH: Final = 110
_SECONDS: Final = 12.0  # that a film takes, where that is neither too slow nor too quick
_RATES: Final = (2, 8)  # frames a second, least and most


def require_writer(form: AnimationFormat | None) -> None:
    """Raise InputError, with what to type, where the film could not be written."""
    if form == "mp4" and not FFMpegWriter.isAvailable():
        raise InputError("expected ffmpeg for --animate mp4, found none on the PATH; install it, or --animate gif")


def write_film(folder: RunFolder, arrays: TrainingArrays, *, name: str, form: AnimationFormat) -> None:
    """Film a training, a frame a moment; name: of the model."""
    shown = [statistic for statistic in shown_in("training") if statistic in arrays.mean][:_PANELS]
    film = learning_film(
        epochs=[int(epoch) for epoch in arrays.epochs],
        values={STATISTICS[statistic].label: arrays.mean[statistic] for statistic in shown},
        similarity=None if arrays.similarity is None else near_offsets(arrays.similarity),
        name=name,
    )
    rate = int(min(max(film.frames / _SECONDS, _RATES[0]), _RATES[1]))
    path = folder.place(*FILM.format(form=form).split("/"))
    with write_atomically(path) as temporary, matplotlib.rc_context({"savefig.bbox": None}):
        writer = _writer(form, rate)
        with writer.saving(film.figure, str(temporary), _DOTS_PER_INCH):
            # the last moment stays for a second
            for frame in [*range(film.frames), *[film.frames - 1] * (rate - 1)]:
                film.show(frame)
                writer.grab_frame()


def _writer(form: AnimationFormat, rate: int) -> AbstractMovieWriter:
    return PillowWriter(fps=rate) if form == "gif" else FFMpegWriter(fps=rate, codec="h264")
