"""`vitlens.failures`: the diagnosis of a model's errors, with maps of its predictions."""

from contextlib import nullcontext

from vitlens.analysis.evaluation.evaluate import evaluate
from vitlens.analysis.failures.covariates import Subject
from vitlens.analysis.failures.diagnosis import Advance, Diagnosis, diagnose
from vitlens.attribution.explain import explain, preferred_method
from vitlens.data.split import as_split
from vitlens.inputs import takes_splits
from vitlens.models.model import Model
from vitlens.pixels import AnyImages
from vitlens.shapes import Labels


@takes_splits
def failures(
    model: Model,
    images: AnyImages,
    labels: Labels | None = None,  # noqa: ARG001  the decorator gives them to the images
    *,
    second: Model | None = None,
    method: str | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    advance: Advance = lambda _: None,
) -> Diagnosis:
    """Diagnose why a model misclassifies labelled images.

    The diagnosis names properties in which errors differ, and changes that fix them.

    images: a Split, or any form that `vitlens.images` takes.
    labels: class indices of the model (n,) (None: those of the Split or the class folders).
    second: another model of these classes, diagnosed on the same images.
    method: the method of the maps of the predicted class (None: the preferred one of the model's
        family).

    A cause is named only where errors differ in a property and its change fixes more of them than a
    control of the same size; see vitlens/analysis/failures/rows.py. Raises DataError without
    labels, InputError when a model does not know the data's classes, and UnsupportedError for a
    method that the model does not have.

    >>> import vitlens
    >>> diagnosis = vitlens.failures(
    ...     vitlens.load("cnn-digits"), vitlens.load_data("digits", limit=40)
    ... )
    >>> diagnosis.failures, diagnosis.causes
    (2, ())
    """
    split = as_split(images)
    models = [model]
    if second is not None:
        models.append(second)
    subjects = []
    for subject in models:
        evaluation = evaluate(subject, split, batch_size=batch_size, advance=advance)
        map_method = method or preferred_method(subject)
        maps = explain(subject, split, method=map_method, batch_size=batch_size, seed=seed)
        maps = maps.detach().float().cpu()
        subjects.append(Subject(subject, split, evaluation, maps, batch_size=batch_size, seed=seed))
    return diagnose(subjects, progress=lambda _: nullcontext(advance))
