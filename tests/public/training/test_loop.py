"""Files of a training, resuming, refusals, and what a watcher sees."""

import math
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import vitlens
from tests.kit import trainings
from tests.kit.select import names_in, select, values_of
from tests.kit.trainings import (
    TEST,
    TRAIN,
    EnoughError,
    interrupting,
    plain_recipe,
    same,
    state,
    tiny_model,
    trained,
)
from tests.kit.waiting import HANGS
from vitlens import Model
from vitlens.errors import DataError, InputError, NonFiniteError, StorageError

pytestmark = pytest.mark.usefixtures("progress_every_step")
STATE = "checkpoint/state.safetensors"
STEPS = 3 * 5  # three epochs of five batches of eight


def accuracy_of(file: object) -> float:
    with torch.inference_mode():
        logits = vitlens.load(str(file))(next(TEST.batches(12)).images)
    return (logits.argmax(1) == TEST.labels).float().mean().item()


def as_before(model: Model) -> bool:
    """Return True if a model is again frozen, in evaluation mode and without hooks."""
    modes = any(module.training or module._forward_hooks for module in model.modules())
    blocks = model.module.blocks
    plain = all(block.attn.fused and "forward" not in block.__dict__ for block in blocks)
    return (
        plain and not modes and not any(parameter.requires_grad for parameter in model.parameters())
    )


def test_the_files_match_the_result_and_the_model_is_as_before(tmp_path):
    model, result = trained(tmp_path, tiny_model().eval().requires_grad_(False), recompute=True)
    assert same(load_file(result.weights), state(model))
    assert accuracy_of(result.weights) == pytest.approx(result.accuracy)
    assert accuracy_of(result.best_weights) == pytest.approx(result.best_accuracy)
    assert values_of(result.history, "epoch", "images") == [
        (0, 40),
        (1, 80),
        (2, 120),
    ]
    accuracies = values_of(result.history, "test_accuracy")
    assert (result.best_accuracy, result.best_epoch) == (
        max(accuracies),
        accuracies.index(max(accuracies)),
    )
    assert (result.accuracy, result.seconds) == (accuracies[-1], result.history[-1].seconds)
    files = {"best.safetensors", "model.safetensors", "metrics.jsonl", "checkpoint"}
    assert names_in(tmp_path) == files
    precision, compiling = result.notes
    assert "(chosen)" in precision
    assert compiling.startswith("compile off (")
    assert as_before(model)


@pytest.mark.parametrize(
    ("at", "every", "again", "optimiser"),
    [(7, None, 6, "muon"), (2, 3, 1, "adamw"), (9, 3, 7, "adamw"), (STEPS, 3, 13, "adamw")],
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, at, every, again, optimiser):
    settings = {"recipe": trainings.tiny_recipe(optimiser=optimiser), "checkpoint_every": every}
    cut = tmp_path / "cut"
    steps = list[int]()
    uninterrupted, _ = trained(tmp_path / "whole", **settings)
    with pytest.raises(EnoughError):
        trained(cut, on_progress=interrupting(at), **settings)
    more = {"resume": True, **settings}
    resumed, result = trained(
        cut, tiny_model(seed=7), on_progress=lambda facts: steps.append(facts.step), **more
    )
    assert min(steps) == again
    assert same(state(resumed), state(uninterrupted))
    assert trainings.timeless(cut) == trainings.timeless(tmp_path / "whole")
    for name in ("best.safetensors", "model.safetensors"):
        assert same(load_file(cut / name), load_file(tmp_path / "whole" / name))
    last, repeated = trained(cut, tiny_model(seed=8), **more)  # nothing is left to do
    assert (repeated, same(state(last), state(uninterrupted))) == (result, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"recipe": plain_recipe(epochs=1, learning_rate=1.0)},
            r"recipe\.learning_rate = 0.003, found 1.0",
        ),
        ({"seed": 3}, "seed = 0, found 3"),
        ({"train": trainings.tiny_split("train", 39)}, r"data\.train = 40, found 39"),
        ({"test": trainings.tiny_split("test", 11)}, r"data\.test = 12, found 11"),
        *(
            (
                {
                    part: trainings.split_of(
                        255 - next(split.batches(40)).images.mul(255).byte(), part=part
                    )
                },
                "found others",
            )
            for part, split in (("train", TRAIN), ("test", TEST))
        ),
        ({"model": tiny_model(depth=1)}, r"architecture\.overrides"),
        ({"train_last": 1}, "train_last = None, found 1"),
    ],
)
def test_resuming_another_run_is_refused_by_the_first_difference(tmp_path, changes, message):
    recipe = plain_recipe(epochs=1)
    trained(tmp_path, recipe=recipe, resume=True)  # without a checkpoint it starts
    with pytest.raises(InputError, match=message):
        trained(tmp_path, resume=True, **{"recipe": recipe, **changes})


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    """Killed in the middle of writing its fourth checkpoint."""
    threads = torch.get_num_threads()
    folder = tmp_path / "killed"
    torch.set_num_threads(1)
    try:
        uninterrupted, _ = trained(tmp_path / "whole")
        command = [sys.executable, "-m", "tests.kit.training_job", str(folder), "4"]
        done = subprocess.run(command, cwd=Path(__file__).parents[3], timeout=HANGS, check=False)
        assert done.returncode == -signal.SIGKILL
        resumed, _ = trained(folder, tiny_model(seed=7), resume=True)
    finally:
        torch.set_num_threads(threads)
    assert same(state(resumed), state(uninterrupted))
    assert trainings.timeless(folder) == trainings.timeless(tmp_path / "whole")
    assert not list((folder / "checkpoint").glob(".*"))


def test_a_broken_checkpoint_is_refused(tmp_path):
    trained(tmp_path, recipe=plain_recipe(epochs=1))
    (tmp_path / STATE).write_bytes((tmp_path / STATE).read_bytes()[:-4])
    with pytest.raises(InputError, match="train anew in another folder"):
        trained(tmp_path, recipe=plain_recipe(epochs=1), resume=True)


BARE = replace(TRAIN, labels=None)
ONE = [
    replace(split, classes=("a",), labels=torch.zeros(len(split), dtype=torch.long))
    for split in (TRAIN, TEST)
]
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"train": BARE}, DataError, "train images in random, found images without labels"),
    ({"test": replace(TEST, labels=None)}, DataError, "test images in random"),
    ({"train": TRAIN.pick(torch.arange(0))}, DataError, "found none"),
    ({"train": replace(TRAIN, classes=("a", "b"))}, InputError, "2 classes"),
    ({"train": replace(TRAIN, labels=torch.full((40,), 3))}, DataError, "0 to 2"),
    ({"test": replace(TEST, labels=TEST.labels - 1)}, DataError, "-1 to 1"),
    ({"train": replace(TRAIN, labels=torch.arange(40) % 2)}, DataError, r"none of 1 \(c\)"),
    (
        {"model": tiny_model(classes=("a",)), "train": ONE[0], "test": ONE[1]},
        DataError,
        "at least 2 classes",
    ),
    ({"keep_every": 0}, InputError, "keep_every="),
    ({"train_last": 3}, InputError, "train_last= from 0 to 2"),
    ({"train_last": -1}, InputError, "train_last="),
    ({"precision": "fp8"}, InputError, "no precision 'fp8'"),
    ({"compiling": "maybe"}, InputError, "no compiling 'maybe'"),
    ({"train": [1, 2]}, DataError, "vitlens.load_data"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path, number):
    changes, error, message = REFUSED[number]
    with pytest.raises(error, match=message):
        trained(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def poisoning(model: Model, weight: str, *, at: int, value: float) -> Callable[[Any], None]:
    """Return a callback that sets a weight after a step."""

    def poison(progress: Any) -> None:
        if progress.step == at:
            model.module.get_parameter(weight).data.fill_(value)

    return poison


def test_a_loss_that_explodes_keeps_the_last_good_weights_and_the_model_its_state(tmp_path):
    model = tiny_model().eval().requires_grad_(False)
    poison = poisoning(model, "head.weight", at=12, value=math.nan)
    with pytest.raises(NonFiniteError, match=r"epoch 3, step 13.*learning_rate=0\.001"):
        trained(tmp_path, model, on_progress=poison, recompute=True)
    assert as_before(model)
    assert len(trainings.timeless(tmp_path)) == 2
    for file in ("model.safetensors", "best.safetensors", STATE):
        for value in load_file(tmp_path / file).values():
            assert value.isfinite().all()


def test_weights_that_explode_in_the_last_step_of_an_epoch_are_not_written(tmp_path):
    model = tiny_model()
    with pytest.raises(NonFiniteError, match=r"model/head\.bias"):
        trained(tmp_path, model, on_progress=poisoning(model, "head.bias", at=10, value=math.inf))
    assert len(trainings.timeless(tmp_path)) == 1


@pytest.mark.parametrize("at", [4, 8])
def test_a_full_disk_leaves_a_checkpoint_to_resume_from(tmp_path, at):
    """The kernel refuses a write, as a full disk does: of a checkpoint within the epoch."""
    uninterrupted, _ = trained(tmp_path / "whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(progress: Any) -> None:
        if progress.step == at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

    try:
        with pytest.raises(StorageError, match=r"room|full"):
            trained(tmp_path / "full", on_progress=fill, checkpoint_every=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(names_in(tmp_path / "full" / "checkpoint")) == ["state.safetensors"]
    resumed, _ = trained(tmp_path / "full", tiny_model(seed=7), resume=True)
    assert same(state(resumed), state(uninterrupted))


def test_progress_counts_up_to_the_end(tmp_path):
    heard: list[Any] = []
    times = [perf_counter()]
    _, result = trained(
        tmp_path, on_progress=lambda facts: heard.append(facts) or times.append(perf_counter())
    )
    steps = [progress.step for progress in heard]
    last = heard[-1]
    assert steps == sorted(steps)
    assert {*steps} == {*range(1, STEPS + 1)}
    assert (last.steps, last.seconds_left, last.test_accuracy) == (STEPS, 0.0, result.accuracy)
    assert heard[0].test_accuracy is None
    assert (last.loss, last.accuracy) == pytest.approx(
        (result.history[-1].train_loss, result.history[-1].train_accuracy)
    )
    for progress in heard:
        assert progress.images_per_second > 0
        assert 0 <= progress.accuracy <= 1
    late = steps.index(STEPS - 1)
    elapsed = (STEPS - 1) * heard[late].seconds_left  # one step is left
    assert times[late + 1] - times[1] <= elapsed <= times[late + 1] - times[0]


class Notes:
    """A watcher that reads everything and draws random numbers; it may fail at a given point."""

    def __init__(self, name: str = "", fails: str = "", order: list[str] | None = None) -> None:
        self.name = name
        self.fails = fails
        self.closed = [] if order is None else order
        self.steps = list[Any]()
        self.epochs = list[Any]()
        self.weights = dict[str, torch.Tensor]()

    def on_step(self, facts: Any) -> None:
        torch.rand(3)
        self.steps.append(facts)
        if self.fails == "step":
            raise ZeroDivisionError

    def on_epoch(self, metrics: Any, model: Model) -> None:
        images = next(TEST.batches(4)).images
        vitlens.statistics(model, images)
        vitlens.rollout(model, images)
        torch.rand(7)
        self.epochs.append(metrics)
        self.weights = state(model)

    def close(self) -> None:
        self.closed.append(self.name)
        if self.fails == "close":
            raise ZeroDivisionError


def test_every_step_and_every_epoch_is_reported_once_also_by_a_resumed_run(tmp_path):
    """Watching changes no bit, nor do the caller's random numbers; it sees the averaged weights,
    which are tested.
    """
    notes = Notes()
    first = Notes()
    second = Notes()
    random = torch.manual_seed(5).get_state()
    alone, _ = trained(tmp_path / "alone")
    assert torch.equal(torch.get_rng_state(), random)
    torch.manual_seed(6)
    model, result = trained(tmp_path / "whole", watchers=[notes])
    assert same(state(model), state(alone))
    assert not same(state(model), state(trained(tmp_path / "other", seed=1)[0]))
    assert trainings.timeless(tmp_path / "whole") == trainings.timeless(tmp_path / "alone")
    assert same(notes.weights, state(model))
    assert values_of(notes.steps, "step", "epoch") == [
        (step + 1, step // 5) for step in range(STEPS)
    ]
    assert tuple(notes.epochs) == result.history
    for metrics in notes.epochs:
        epoch_steps = select(notes.steps, epoch=metrics.epoch)
        assert metrics.train_loss == pytest.approx(
            sum(facts.loss for facts in epoch_steps) / 5, rel=1e-6
        )
        assert metrics.gradient_norm == pytest.approx(
            sum(facts.gradient_norm for facts in epoch_steps) / 5, rel=1e-6
        )
        assert metrics.learning_rate == epoch_steps[-1].learning_rate
    for facts in notes.steps:
        assert 0 < facts.images_per_second < math.inf
    with pytest.raises(EnoughError):
        trained(tmp_path / "cut", on_progress=interrupting(7), watchers=[first])
    trained(tmp_path / "cut", tiny_model(seed=7), resume=True, watchers=[second])
    assert values_of(second.steps, "step") == list(range(6, STEPS + 1))
    assert values_of(second.epochs, "epoch") == [1, 2]
    assert [len(tracker.closed) for tracker in (notes, first, second)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("fails", "changes", "error"),
    [
        ("step", {}, ZeroDivisionError),
        ("close", {}, ZeroDivisionError),
        ("", {"train": BARE}, DataError),  # before anything begins
        # which torch before 2.9 does not have
        (
            "",
            {"recipe": plain_recipe(optimiser="muon")},
            InputError,
        ),
    ],
)
def test_all_watchers_are_closed_though_something_fails(
    tmp_path, fails, changes, error, monkeypatch
):
    monkeypatch.delattr(torch.optim, "Muon")
    order: list[str] = []
    watchers = [Notes("a", "", order), Notes("b", fails, order), Notes("c", "", order)]
    with pytest.raises(error):
        trained(tmp_path, **{"watchers": watchers, "recipe": plain_recipe(epochs=1), **changes})
    assert order == ["c", "b", "a"]


def test_weights_are_kept_before_training_and_at_intervals_in_half_precision(tmp_path):
    initial, (without, _) = state(tiny_model()), trained(tmp_path / "without")
    model, _ = trained(tmp_path, keep_every=1)
    assert same(state(model), state(without))
    files = sorted((tmp_path / "kept").iterdir())
    assert [file.name for file in files] == [f"epoch-{epoch:04}.safetensors" for epoch in range(4)]
    for file, weights in ((files[0], initial), (files[3], state(model))):
        assert same(load_file(file), {name: value.half() for name, value in weights.items()})
        assert vitlens.load(str(file)).classes == model.classes


@pytest.mark.parametrize("at", [1, 11])
def test_a_resumed_run_has_each_once_and_another_training_anew(tmp_path, at):
    def kept(name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / name / "kept").iterdir()}

    cut = tmp_path / "cut"
    folder = tmp_path / "cut" / "kept"
    trained(tmp_path / "whole", keep_every=1)
    with pytest.raises(EnoughError):
        trained(cut, on_progress=interrupting(at), keep_every=1)
    before = kept("cut")
    assert "epoch-0000.safetensors" in before
    (folder / ".epoch-0001-abc.safetensors").write_bytes(b"half-written")
    trained(cut, tiny_model(seed=7), resume=True, keep_every=1)
    assert kept("cut") == kept("whole")
    assert before.items() <= kept("cut").items()
    for name in ("epoch-12345.safetensors", "mine.safetensors"):
        (folder / name).write_bytes(b"mine")
    trained(cut, recipe=trainings.tiny_recipe(epochs=1), keep_every=1)
    assert sorted(kept("cut")) == [
        "epoch-0000.safetensors",
        "epoch-0001.safetensors",
        "mine.safetensors",
    ]
