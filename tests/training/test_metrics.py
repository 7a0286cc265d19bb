import dataclasses
import json
from pathlib import Path

import pytest

from vitlens.errors import InputError, StorageError
from vitlens.schema import read_as
from vitlens.training.metrics import (
    METRICS_FILE,
    EpochMetrics,
    Standing,
    append_metrics,
    read_metrics,
    rewrite_metrics,
)


def metrics(epoch: int, accuracy: float | None = 0.5) -> EpochMetrics:
    return EpochMetrics(epoch, epoch + 1, 8, 0.1, 1.0, 0.5, None if accuracy is None else 1.5, accuracy, 2.0, 4.0)


def test_lines_come_back_as_they_were(tmp_path: Path) -> None:
    history = (metrics(0), metrics(1, None), metrics(2))
    for line in history:
        append_metrics(tmp_path, line)
    assert read_metrics(tmp_path) == history


def test_rewriting_drops_later_and_half_written_lines(tmp_path: Path) -> None:
    append_metrics(tmp_path, metrics(0))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"epoch": 1, "st')
    with pytest.raises(InputError, match=METRICS_FILE):
        read_metrics(tmp_path)
    rewrite_metrics(tmp_path, (metrics(0),))
    assert read_metrics(tmp_path) == (metrics(0),)


def test_files_of_before_gradient_norms_are_read(tmp_path: Path) -> None:
    append_metrics(tmp_path, dataclasses.replace(metrics(0), gradient_norm=0.7))
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text().replace(', "gradient_norm": 0.7', ""))
    assert read_metrics(tmp_path)[0].gradient_norm is None


@pytest.mark.parametrize("text", ["{", '{"epoch": 1}\n', '["a"]\n', "\xff"])
def test_a_corrupt_file_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / METRICS_FILE).write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"^expected .*metrics\.jsonl"):
        read_metrics(tmp_path)


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=METRICS_FILE):
        append_metrics(tmp_path / "gone", metrics(0))


def test_the_best_look_is_the_first_of_the_highest() -> None:
    standing = Standing()
    for epoch, accuracy in enumerate((0.2, None, 0.7, 0.7, 0.6)):
        standing = standing.after(metrics(epoch, accuracy))
    assert (standing.best_accuracy, standing.best_epoch, len(standing.history)) == (0.7, 2, 5)
    stored = json.loads(json.dumps(dataclasses.asdict(standing)))
    assert read_as(Standing, stored, source="a checkpoint") == standing
