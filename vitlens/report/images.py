"""The images of a run in sentences: how many of which data set, how they were processed, which were left out."""

from collections.abc import Iterator
from typing import Any

from vitlens.recorded import Data
from vitlens.report.document import Sentence


def data_sentences(record: Any) -> tuple[Sentence, ...]:
    """The images of a run; names in them are as the record has them."""
    data = record.config.data
    return () if data is None else (Sentence(" ".join(_data_words(data))),)


def _data_words(data: Data) -> Iterator[str]:
    unnamed = data.title == "images"  # files named by --images, of no data set
    yield f"{data.images:,} image{'s' if data.images != 1 else ''}{'' if unnamed else ' of ' + data.title}."
    for note in data.notes:
        yield f"{note[:1].upper()}{note[1:].rstrip('.')}."
    if data.skipped:
        files = "; ".join(f"{skipped.file}: {skipped.reason}" for skipped in data.skipped[:10])
        more = f"; and {len(data.skipped) - 10} more in config.json" if len(data.skipped) > 10 else ""
        were = "images were" if len(data.skipped) > 1 else "image was"
        yield f"{len(data.skipped)} {were} left out ({files}{more})."
