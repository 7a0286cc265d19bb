"""What could overturn the verdicts of an audit, the most serious first."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

from vitlens.commands.audit.parts import Parts
from vitlens.commands.audit.record import CANDIDATES, UNTESTED
from vitlens.commands.audit.report.answers import attack_words
from vitlens.commands.explain.record import SETTINGS
from vitlens.records import Record
from vitlens.report.document import Sentence

MOST: Final = 5
_LOST: Final = {  # chapter -> what nothing is known of without it
    "evaluate": "Nothing is known of accuracy, calibration and failures",
    "explain": "No map was checked, so none may be trusted",
    "stats": "Attention health was not tested",
    "corruptions": "Common corruptions were not tested",
    "attack": "Robustness was not tested",
}


def limits(record: Record, parts: Parts) -> tuple[Sentence, ...]:
    """At most MOST, from this run's own rows."""
    return tuple(islice(_limits(record, parts), MOST))


def _limits(record: Record, parts: Parts) -> Iterator[Sentence]:
    for row in record.rows(UNTESTED):
        yield Sentence(f"{_LOST[row.part]}: {row.reason}.", (row,))
    yield from _attack(record)
    data = record.config.data
    if data is not None:
        count = f"{data.images:,} image{'s' if data.images != 1 else ''}"
        yield Sentence(
            f"The verdicts hold for images like these {count} of {data.title}; the intervals cover which of them were "
            "drawn, not other sources of images and not another training of the model.",
            (data,),
        )
    if "explain" in parts:
        settings = parts["explain"].record.rows(SETTINGS)
        checked = f"{settings[0].images} image{'s' if settings[0].images != 1 else ''}"
        yield Sentence(
            f"Maps were checked on {checked} with patches replaced in one way; a method that is best here may not be "
            "with another replacement, and a map that may be trusted is no explanation of what defines a class.",
            settings,
        )
    if "corruptions" in parts:
        kinds = {row.kind for row in parts["corruptions"].record.corruptions}
        if kinds:
            yield Sentence(
                f"Images in use may change in other ways than the {len(kinds)} kinds of corruption that were tried.",
                (len(kinds), kinds),
            )


def _attack(record: Record) -> Iterator[Sentence]:
    candidates = record.rows(CANDIDATES)
    taken = next((row for row in candidates if row.state == "chosen"), None)
    if taken is None:
        return
    untried = [row for row in candidates[: candidates.index(taken)] if row.minutes is not None]
    if untried:
        yield Sentence(
            f"Robust accuracy is an upper bound: {attack_words(untried[0])} and other stronger attacks did not fit the "
            f"budget, and may break more images than {attack_words(taken)}.",
            (taken, *untried),
        )
