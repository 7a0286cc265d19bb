"""Sentences about the images of a report, above its sections."""

from collections.abc import Iterator, Sequence
from typing import Final

from vitlens.display import protected, visible
from vitlens.record import Record, SkippedEntry
from vitlens.report.prose import finalize

_SKIPPED: Final = 10  # most skipped files that are printed with their reason


def image_sentences(record: Record) -> Iterator[str]:
    """Yield sentences about the images, their data set and processing, and the skipped files."""
    data = record.config.data
    if data is None:
        return
    noun = "image" if data.images == 1 else "images"
    if data.title == "images":  # files of no data set
        yield f"{data.images:,} {noun}."
    else:
        yield f"{data.images:,} {noun} of {finalize(data.title)}."
    counts = record.images_of_parts
    if len({data.images, *counts.values()}) > 1:
        listed = ", ".join(f"{finalize(part)} {count:,}" for part, count in counts.items())
        yield f"Numbers of images by part: {listed}."
    for note in data.notes:
        text = protected(visible(note))
        yield f"{text[:1].upper()}{text[1:].rstrip('.')}."
    if data.skipped:
        yield _skipped_images(data.skipped)


def _skipped_images(skipped: Sequence[SkippedEntry]) -> str:
    """Return a sentence that counts the skipped files and gives the reasons for the first ones."""
    reasons = [
        f"{finalize(file.file)}: {protected(visible(file.reason))}" for file in skipped[:_SKIPPED]
    ]
    if len(skipped) > _SKIPPED:
        reasons.append(f"and {len(skipped) - _SKIPPED} more in config.json")
    were = "image was" if len(skipped) == 1 else "images were"
    return f"{len(skipped)} {were} left out ({'; '.join(reasons)})."
