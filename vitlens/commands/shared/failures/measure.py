"""Writing the failures of several models by category, with their causal tests and examples."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vitlens.analysis.failures.causal import EXAMPLES, Repair, Subject, sample_of, tested_images
from vitlens.analysis.failures.diagnosis import Diagnosis, diagnosis, rules_of, together
from vitlens.analysis.failures.rules import Applied
from vitlens.analysis.failures.taxonomy import CATEGORIES, NOT_EXPLAINED
from vitlens.analysis.faithfulness.resampled import AnyMaps
from vitlens.commands.run.folder import RunFolder
from vitlens.commands.run.progress.bar import progress
from vitlens.commands.shared.failures.rows import (
    FAILURE_ARRAYS,
    FAILURE_EXAMPLES,
    FAILURES,
    REPAIRS,
    FailureExampleArrays,
    FailureExampleRow,
    FailureRow,
    RepairRow,
)
from vitlens.uncertainty import Estimate


def write_failures(
    folder: RunFolder,
    subjects: Sequence[Subject],
    maps: Sequence[tuple[Tensor, AnyMaps]],
    *,
    given: Mapping[str, Applied],
    quiet: bool,
) -> None:
    """Write each model's failures by category, its causal tests, and examples of each category.

    maps: of the predicted class, for each model the indices of images and their maps; given: rules that several models
    decide together, the same for all.
    """
    each = []
    for subject in subjects:
        rules = {**rules_of(subject), **given}
        images = 2 * sum(len(members) for members in tested_images(subject, rules).values())
        with progress(f"failures of {subject.model.alias}", images, quiet=quiet) as advance:
            each.append(diagnosis(subject, rules, advance=advance))
    diagnoses = together(each)
    folder.write(FAILURES, [row for found in diagnoses for row in _rows(found)])
    folder.write(REPAIRS, [_repair_row(found.alias, repair) for found in diagnoses for repair in found.repairs])
    rows: list[FailureExampleRow] = []
    for subject, found, (indices, values) in zip(subjects, diagnoses, maps):
        own = list(_examples(subject, found, indices))
        rows += [row for row, _ in own]
        if own:
            place = {index: at for at, index in enumerate(indices.tolist())}
            chosen = torch.tensor([place[row.image] for row, _ in own])
            folder.save(FAILURE_ARRAYS, _arrays(subject, own, values[chosen]), model=found.alias)
    folder.write(FAILURE_EXAMPLES, rows)


def _rows(found: Diagnosis) -> Iterator[FailureRow]:
    """The categories of one model, those that cannot be judged too, and what is not explained."""
    known = {rate.category: rate for rate in found.rates}
    for category in CATEGORIES:
        rate = known.get(category)
        if rate is None:
            yield _row(found.alias, category, None, None, None)
        else:
            yield _row(
                found.alias, category, rate.failures, rate.successes, rate.difference,
                more_frequent=rate.more_frequent, explains=category in found.explaining,
            )  # fmt: skip
    yield _row(found.alias, NOT_EXPLAINED, found.not_explained, None, None)


def _row(
    alias: str,
    category: str,
    failures: Estimate | None,
    successes: Estimate | None,
    difference: Estimate | None,
    *,
    more_frequent: bool = False,
    explains: bool = False,
) -> FailureRow:
    wrong, right = (0 if each is None else each.n or 0 for each in (failures, successes))
    return FailureRow(
        alias, category, wrong, *_ends(failures), right, *_ends(successes), *_ends(difference), more_frequent, explains
    )


def _repair_row(alias: str, repair: Repair) -> RepairRow:
    changed, control = repair.rates
    return RepairRow(
        model=alias,
        category=repair.category,
        test=repair.test,
        n=len(repair.images),
        corrected=int(repair.corrected.sum()),
        corrected_rate=changed.value,
        corrected_low=changed.low,
        corrected_high=changed.high,
        control=int(repair.control.sum()),
        control_rate=control.value,
        control_low=control.low,
        control_high=control.high,
        gain=repair.gain.value,
        gain_low=repair.gain.low,
        gain_high=repair.gain.high,
        p=repair.p,
        p_holm=repair.p_holm,
        verdict=repair.verdict,
    )


def _ends(estimate: Estimate | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)


def _examples(subject: Subject, found: Diagnosis, indices: Tensor) -> Iterator[tuple[FailureExampleRow, Tensor | None]]:
    """At most three random failures of each category, with their pixels after its test; those without a test are drawn
    among the images with maps."""
    tested = {repair.category: repair for repair in found.repairs}
    mapped = torch.zeros_like(found.correct)
    mapped[indices] = True
    for category in CATEGORIES:
        rule, repair = found.rules.get(category), tested.get(category)
        if rule is None:
            continue
        if repair is None:
            members = sample_of(rule.holds & ~found.correct & mapped, found.groups, seed=subject.seed, most=EXAMPLES)
        else:
            members = repair.images[:EXAMPLES]
        for at, index in enumerate(members.tolist()):
            if mapped[index]:
                yield _example(subject, category, index, repair, at), None if repair is None else repair.edited[at]


def _example(subject: Subject, category: str, index: int, repair: Repair | None, at: int) -> FailureExampleRow:
    evaluation, split = subject.evaluation, subject.split
    prediction = int(evaluation.predictions[index])
    return FailureExampleRow(
        model=evaluation.alias,
        category=category,
        test="" if repair is None else repair.test,
        image=index,
        file=split.files[index] if split.files else f"{split.name} {index}",
        truth=evaluation.classes[int(evaluation.labels[index])],
        prediction=evaluation.classes[prediction],
        probability=round(float(evaluation.probabilities[index, prediction]), 4),
        changed_prediction=None if repair is None else evaluation.classes[int(repair.prediction[at])],
        changed_probability=None if repair is None else round(float(repair.probability[at]), 4),
    )


def _arrays(
    subject: Subject, own: Sequence[tuple[FailureExampleRow, Tensor | None]], maps: AnyMaps
) -> FailureExampleArrays:
    where = torch.tensor([row.image for row, _ in own])
    pixels = next(iter(subject.split.pick(where).batches(len(where)))).images.cpu()
    changed = [torch.zeros_like(pixels[0]) if edited is None else edited for _, edited in own]
    return FailureExampleArrays(
        pixels=_as_bytes(pixels),
        maps=maps.nan_to_num(0.0, 0.0, 0.0).clamp_min(0).numpy(),
        changed=_as_bytes(torch.stack(changed)),
        masks=None if subject.split.masks is None else subject.split.masks[where].cpu().numpy(),
    )


def _as_bytes(images: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.asarray((255 * images.clamp(0, 1)).round().byte().numpy())
