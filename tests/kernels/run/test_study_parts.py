"""Parts of studies and trainings: clocks, traces of cues, teachers, and files that were edited."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.kit.commands import written_digits
from tests.kit.planted_reliance import images, labelled_by, reads
from tests.kit.reliance_rows import misleading_row
from vitlens.analysis.reliance.measure import Measured
from vitlens.commands.run.options import RunOptions
from vitlens.commands.shared.reliance_measure import traced_fields, viewers_of
from vitlens.commands.shared.tracing import trace_cue
from vitlens.commands.shared.trainings import budget_of_run
from vitlens.commands.study.estimate import StudyClock
from vitlens.commands.study.kinds.rows import variant_row
from vitlens.commands.study.kinds.setup import prepare
from vitlens.commands.study.kinds.trials import Trial
from vitlens.commands.study.not_shown import unknown
from vitlens.commands.study.options import StudyOptions
from vitlens.record import RunRecord
from vitlens.report.claims import Claim
from vitlens.uncertainty import Estimate


def test_chapters_of_the_cache_do_not_slow_the_clock_down():
    clock = StudyClock([0.0, 10.0, 10.0])
    clock.finish(5.0)
    clock.finish(20.0)
    assert clock.left == pytest.approx(20.0)


def test_what_is_missing_from_the_files_of_a_training_is_not_known():
    budget = budget_of_run("a", RunRecord(Path(), {"options": {"model": ["b"]}}, {}))
    assert budget.start is None
    assert budget.steps is None


HUE = ("background-colour", "hue-exchanged")


def viewer_of_hue():
    """Return a model that reads the background's hue, with images labelled by the object's."""
    split, factors = images(120)
    labelled = labelled_by("object-hue", split, factors).limit(17)
    (viewer,) = viewers_of([reads("hue")], [labelled], "fp32")
    return viewer


def test_examples_of_a_cue_are_images_that_are_wrong_with_it_and_right_without_it():
    viewer = viewer_of_hue()
    row = misleading_row(viewer.model.alias, *HUE, 20.0)
    trace = trace_cue(viewer, row, methods=(), limit=17)
    assert 0 < len(trace.examples) < 6
    for example in trace.examples:
        assert example.before != example.label
        assert example.after == example.label


@pytest.mark.parametrize("intervention", [HUE, ("fine-detail", "low-pass")])
def test_progress_of_a_trace_ends_at_its_total(intervention):
    viewer = viewer_of_hue()
    row = misleading_row(viewer.model.alias, *intervention, 20.0)
    totals: list[int] = []
    done: list[int] = []

    @contextmanager
    def progress(_: str, total: int) -> Iterator[object]:
        totals.append(total)
        yield done.append

    reliance = Measured((row,), (), (), {}, np.zeros((1, 17), bool), None)
    traced_fields(reliance, [viewer], limit=17, seed=0, progress=progress)
    assert totals == [sum(done)]


@pytest.fixture(scope="module")
def few_images(tmp_path_factory):
    """Return the setup of a distillation on two classes of about ten images."""

    def place(number: int, label: int) -> str:
        part = "test" if number % 2 else "train"
        return f"{part}/{'ab'[label // 5]}/{number}.png"

    folder = written_digits(tmp_path_factory.mktemp("few"), 60, place)
    run = RunOptions(device="cpu", quiet=True)
    options = StudyOptions(kind="distillation", data=str(folder), epochs=1, seeds=2, run=run)
    return prepare(options)


def test_a_teacher_is_not_left_out_before_its_students(few_images):
    labels = {variant.label for variant in few_images.variants}
    for variant in few_images.variants:
        assert {variant.teacher, *variant.against} - {""} <= labels


def test_steps_and_speed_are_those_of_the_trainings_that_did_not_fail(few_images):
    (variant,) = [variant for variant in few_images.variants if variant.label == "alone"]
    trial = Trial(
        correct=np.ones(len(few_images.test), bool),
        epochs=np.zeros(0, int),
        validation=np.zeros(0),
        finite=np.array(True),
        seconds=np.array(1.0),
        images_per_second=np.array(8.0),
        steps=np.array(30),
        parameters=np.array(10),
        flops=np.array(10),
    )
    failed = replace(
        trial, finite=np.array(False), images_per_second=np.array(0.0), steps=np.array(0)
    )
    row = variant_row(few_images, variant, {"alone": [failed, trial]})
    assert (row.steps, row.images_per_second) == (30, 8.0)


class Answered:
    """A study with one chapter and one answer, which rests on few images."""

    studied = ("a", "b")
    left_out = ()
    training = ()
    parts = ()

    def __init__(self, effect: Estimate) -> None:
        claim = Claim("robustness", "a", "a is robust", effect=effect, kind="answer")
        self.chapter = SimpleNamespace(
            claims=(claim,), figure=lambda place: place, record=SimpleNamespace(scores=())
        )

    def of(self, word: str) -> list[SimpleNamespace]:
        return [self.chapter] if word == "attack" else []


@pytest.mark.parametrize(
    ("unit", "low", "high"),
    [("AUC", "0.12", "0.3"), ("fraction", "12.0", "30.0 %"), ("points", "0.1", "0.3 points")],
)
def test_both_ends_of_a_doubtful_effect_have_one_unit(unit, low, high):
    record = Answered(Estimate(0.2, 0.12, 0.3, 30, unit))
    weakest = next(iter(unknown(record))).text  # type: ignore[arg-type]
    assert f" {low} to {high}" in weakest
