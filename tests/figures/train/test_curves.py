import pytest

from tests.figures.reading import cut_off, texts
from vitlens.errors import InputError
from vitlens.figures.train.curves import training_curves


def epochs(number: int) -> list[dict[str, object]]:
    return [
        {
            "epoch": epoch + 1,
            "train_loss": 2 / (epoch + 1),
            "test_loss": 2.5 / (epoch + 1),
            "test_accuracy": 0.9 - abs(epoch - 2) / 100,
            "learning_rate": 1e-3,
        }
        for epoch in range(number)
    ]


@pytest.mark.parametrize("number", [1, 5, 300])
def test_curves_have_the_rows_values(number):
    figure = training_curves(history=epochs(number), title="Training of vit-tiny")
    loss, accuracy, rate = figure.axes
    assert [len(axes.lines) for axes in figure.axes] == [2, 1, 1]
    assert list(loss.lines[0].get_xdata()) == list(range(1, number + 1))
    assert loss.lines[0].get_ydata()[-1] == pytest.approx(2 / number)
    assert max(accuracy.lines[0].get_ydata()) == pytest.approx(
        100 * max(row["test_accuracy"] for row in epochs(number))
    )
    assert rate.get_ylim()[0] == 0
    assert not cut_off(figure)


def test_best_is_said():
    assert "test, best 90.0 (epoch 3)" in texts(training_curves(history=epochs(5)))


def test_epochs_are_whole_numbers():
    ticks = [tick for tick in training_curves(history=epochs(1)).axes[0].get_xticks() if 0.5 < tick < 1.5]
    assert ticks == [1]


def test_what_was_not_measured_is_left_out_and_said():
    rows = [{"epoch": 1, "train_loss": 2.0}, {"epoch": 2, "train_loss": 1.0, "test_loss": 1.5, "test_accuracy": None}]
    figure = training_curves(history=rows)
    assert list(figure.axes[0].lines[1].get_xdata()) == [2]
    assert texts(figure).count("not measured") == 2
    assert not cut_off(figure)


@pytest.mark.parametrize("history", [[], [{"epoch": 1}], [{"train_loss": 1.0}], [{"epoch": 1, "train_loss": None}]])
def test_refused(history):
    with pytest.raises(InputError, match="expected epoch and train_loss in every row"):
        training_curves(history=history)


def test_not_finite():
    with pytest.raises(InputError, match="finite numbers in train_loss"):
        training_curves(history=[{"epoch": 1, "train_loss": float("nan")}])
