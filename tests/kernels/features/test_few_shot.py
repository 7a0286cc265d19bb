"""Nearest class means of a few training images: the draws, and the accuracy by a plain loop."""

import numpy as np
import pytest
import torch

from vitlens.analysis.features.neighbours import drawn_shots, few_shot
from vitlens.errors import DataError

LABELS = torch.tensor([2, 0, 1] * 7)


def vectors(labels: torch.Tensor, *, apart: float, seed: int) -> torch.Tensor:
    """Draw vectors of classes around separate means."""
    means = apart * torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    return (
        means[labels]
        + torch.randn(len(labels), 5, generator=torch.Generator().manual_seed(seed))
        + 3
    )


def test_draws_are_stratified_nested_and_seeded():
    most = drawn_shots(LABELS, most=5, draws=4, seed=1)
    assert most.shape == (4, 3, 5)
    for draw in most:
        assert len(draw.unique()) == 15  # no image twice
        for label, indices in enumerate(draw):
            assert LABELS[indices].unique().tolist() == [label]
    fewer = drawn_shots(LABELS, most=2, draws=4, seed=1)
    assert torch.equal(fewer, most[:, :, :2])
    assert not torch.equal(most[0], most[1])
    assert not torch.equal(most, drawn_shots(LABELS, most=5, draws=4, seed=2))


def test_accuracy_is_that_of_the_nearest_class_mean_in_a_plain_loop():
    train = vectors(LABELS, apart=1, seed=1)
    test = vectors(LABELS, apart=1, seed=2)
    truth = LABELS
    accuracy = few_shot(train, LABELS, test, truth, shots=(1, 3), draws=3, seed=5)
    drawn = drawn_shots(LABELS, most=3, draws=3, seed=5)
    for row, count in enumerate((1, 3)):
        for draw in range(3):
            examples = [train[drawn[draw, label, :count]].double().numpy() for label in range(3)]
            centre = np.concatenate(examples).mean(0)
            means = [
                np.mean([(v - centre) / np.linalg.norm(v - centre) for v in part], axis=0)
                for part in examples
            ]
            right = 0
            for vector, label in zip(test.double().numpy() - centre, truth.tolist()):
                cosines = [vector @ mean / np.linalg.norm(mean) for mean in means]
                right += int(np.argmax(cosines)) == label
            assert accuracy[row, draw].item() == pytest.approx(right / len(truth))


def test_more_images_and_clearer_classes_are_better():
    test = vectors(LABELS, apart=1, seed=2)
    accuracies = few_shot(
        vectors(LABELS, apart=1, seed=1), LABELS, test, LABELS, shots=(1, 7), draws=10
    )
    assert accuracies[1].mean() > accuracies[0].mean()
    clear = [vectors(LABELS, apart=20, seed=seed) for seed in (1, 2)]
    assert few_shot(clear[0], LABELS, clear[1], LABELS, shots=(1,), draws=5).mean() == 1


def test_too_few_images_of_a_class_are_refused():
    with pytest.raises(DataError, match="every class for 8 shots, found 7"):
        drawn_shots(LABELS, most=8, draws=1)
