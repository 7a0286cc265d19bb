"""How long a run may take: the arithmetic, the counts, and that it is printed before the run or not at all."""

import pytest
import torch

import vitlens
from vitlens.analysis.ablation.ablate import measure_effects, units_of
from vitlens.cli.main import run
from vitlens.commands.ablate.measure.expected import ablate_parts
from vitlens.commands.ablate.options import AblateOptions
from vitlens.commands.explain.parts import explain_parts, passes
from vitlens.commands.scaffold import expected
from vitlens.commands.scaffold.expected import Load, Pace, Part, advice, pace_of, seconds_of
from vitlens.commands.scaffold.options import RunOptions
from vitlens.data.digits import digits

ANSWERS, DAMAGE = Part("answers", forwards=100), Part("damage", forwards=1000, shorter="--no-damage")
BROKEN = Part("attack", backwards=200, shorter="--steps")


def test_images_times_the_pace_of_each_model():
    loads = [Load(Pace(0.1, 0.5), (ANSWERS, DAMAGE, BROKEN)), Load(Pace(1.0, 2.0), (ANSWERS,))]
    seconds = seconds_of(loads)
    assert {part.name: spent for part, spent in seconds.items()} == pytest.approx(
        {"answers": 10 + 100, "damage": 100, "attack": 100}
    )
    assert sum(seconds_of(loads, processes=2).values()) == pytest.approx(310 / 2)


def test_a_run_of_two_minutes_needs_no_word_and_a_longer_one_has_the_options_that_count():
    assert advice({ANSWERS: 60.0, DAMAGE: 60.0}) is None
    line = advice({ANSWERS: 60.0, DAMAGE: 600.0, BROKEN: 1.0})
    assert line is not None
    assert "11 min" in line
    assert "--no-damage (10 min" in line
    assert "--limit N" in line
    assert "--steps" not in line  # it would save a second of eleven minutes


@pytest.mark.parametrize(("size", "patch", "proposed"), [(518, 14, True), (224, 14, False), (518, None, False)])
def test_smaller_images_are_proposed_where_they_are_large_and_made_of_patches(size, patch, proposed):
    line = advice({ANSWERS: 500.0}, size=(size, size), patch=patch)
    assert line is not None
    assert ("--image-size 224" in line) == proposed


@pytest.mark.parametrize(
    ("readings", "forward", "backward"),
    # one image; then a pass of all 4 to warm up, one that is timed, and one forward and back
    [((0.0, 0.5, 1.0, 2.0, 2.8, 3.0, 5.0), 0.2, 0.5), ((0.0, 3.0, 4.0, 11.0), 3.0, 7.0)],
)
def test_few_images_are_timed_and_of_a_slow_model_one(tiny_vit, readings, forward, backward):
    clock = iter(readings)
    model, split = vitlens.load(str(tiny_vit)), digits("test").limit(4)
    pace = pace_of(model, split, backward=True, options=RunOptions(device="cpu"), clock=lambda: next(clock))
    assert (pace.forward, pace.backward) == pytest.approx((forward, backward))
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_maps_cost_what_the_registry_says():
    (maps, checks, searched) = explain_parts(["gradcam", "rise"], 10, verify=True, counterfactuals=True)
    assert (maps.forwards, maps.backwards) == (5120, 10)
    assert checks.forwards > maps.forwards
    assert searched.shorter == "--no-counterfactuals"
    more = {"substrates": 2, "stability": True, "composites": 50}
    others, steady, composites = list(
        explain_parts(["gradcam", "rise"], 10, verify=True, counterfactuals=False, **more)
    )[2:]
    assert (others.forwards, others.shorter) == (2 * 2 * 10 * 4 * 10, "--other-substrates none")
    assert (steady.forwards, steady.backwards, steady.shorter) == (512 * 40, 40, "--no-stability")
    assert (composites.forwards, composites.shorter) == (512 * 50, "--composites none")


def test_a_map_in_passes_is_what_the_parts_count():
    for method in ("gradcam", "rise", "best", "attention"):
        for views, times in ((1, None), (4, None), (2, "relevance")):
            one = passes(method, views=views, times=times)
            (maps,) = explain_parts([method], 1, verify=False, counterfactuals=False, views=views, times=times)
            assert one == max(1, round(maps.forwards + 3 * maps.backwards))
    assert passes("rise") > 50 * passes("gradcam")


def test_removals_cost_about_what_they_are_measured_to(tiny_vit):
    """The plan's count against the measured one, which it may not be far above or below."""
    model, units = vitlens.load(str(tiny_vit)), units_of(vitlens.load(str(tiny_vit)))
    (batch,) = digits("test").limit(6).batches(6)
    assert batch.labels is not None
    measured = measure_effects(model, batch.images, batch.labels, units).forward_equivalents
    (part,) = ablate_parts(units, 6, AblateOptions("", curves=False, pairs=0, patch=False))
    assert part.forwards / 6 == pytest.approx(measured, rel=0.5)


def test_it_is_said_on_stderr_before_anything_is_written(tiny_vit, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(expected, "PATIENCE", 0.0)
    looked: list[bool] = []
    timed = expected.passes

    def passes(*args: object, **options: object) -> list[float]:
        looked.append((tmp_path / "out").exists())
        return timed(*args, **options)

    monkeypatch.setattr(expected, "passes", passes)
    arguments = ["evaluate", str(tiny_vit), "--limit", "20", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert run(arguments) == 0
    assert "--limit N" in capsys.readouterr().err
    assert looked == [False, False]
    work = (vitlens.load(str(tiny_vit)), digits("test").limit(20), [ANSWERS])
    expected.print_expected([work], RunOptions(device="cpu", quiet=True))
    assert looked == [False, False]
    assert capsys.readouterr().err == ""


def test_the_probe_leaves_the_random_state_as_it_was(tiny_vit):
    model, split = vitlens.load(str(tiny_vit)), digits("test").limit(4)
    before = torch.random.get_rng_state()
    pace_of(model, split, backward=True, options=RunOptions(device="cpu"))
    assert torch.equal(before, torch.random.get_rng_state())
