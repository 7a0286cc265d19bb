"""The largest effects of all chapters of a study."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from vitlens.commands.study.record import StudyRecord
from vitlens.report.claims import Claim
from vitlens.report.findings import largest, not_doubted


def findings(record: StudyRecord, most: int | None = None) -> tuple[Claim, ...]:
    """Return the largest effects of all chapters, the largest first.

    Only effects count that survive correction over everything measured and rest on no measurement
    in doubt. Their figures have the names that they have in the study.
    most: the largest number of effects; None for all.
    """
    effects: list[Claim] = []
    for chapter in record.parts:
        if chapter.row.word == "train":  # evaluate judges the same models on the same images
            continue
        trusted = not_doubted(chapter.effects, chapter.claims)
        effects += [replace(claim, place=chapter.figure(claim.place)) for claim in trusted]
    return largest(_without_repeats(effects), most)


def _without_repeats(effects: Iterable[Claim]) -> Iterator[Claim]:
    """Yield each effect once.

    If two chapters measure the same difference, the one on more images counts.
    """
    claims_by_key: dict[tuple[str, str], Claim] = {}
    for claim in effects:
        key = (claim.question, claim.says)
        if claim.question == "which is better":
            # its sentences contain numbers, which differ between chapters
            key = (claim.question, claim.subject)
        earlier = claims_by_key.get(key)
        if earlier is None or count_images(claim) > count_images(earlier):
            claims_by_key[key] = claim
    yield from claims_by_key.values()


def count_images(claim: Claim) -> int:
    """Return the number of images on which an effect was measured, 0 if it is unknown."""
    if claim.effect is None:
        return 0
    return claim.effect.n or 0
