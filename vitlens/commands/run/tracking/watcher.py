"""`vitlens train --track`: the numbers and figures of a training that trackers receive, attention among them.

Layers are numbered from 0, as in results.json: attention_entropy/patches/layer_00.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.rollout import rollout
from vitlens.analysis.heads.registry import STATISTICS
from vitlens.analysis.heads.statistics import Statistics, statistics
from vitlens.commands.run.tracking.trackers import Tracker
from vitlens.data.split import Split
from vitlens.display import for_terminal
from vitlens.errors import UnsupportedError
from vitlens.figures.overlays import overlay_rows
from vitlens.models.model import Model
from vitlens.names import TrackerName
from vitlens.shapes import Images
from vitlens.training.metrics import EpochMetrics, StepMetrics

EVERY_STEPS = 10  # between numbers of single updates
EVERY_EPOCHS = 5  # between pictures
WATCHED = 16  # test images whose attention is measured
SHOWN = 4  # of them, in a picture
_EPOCH_METRICS = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "images_per_second", "gradient_norm")


class TrackerWatcher:
    """A Watcher that logs a training to one or more trackers.

    Every EVERY_STEPS updates loss, learning rate, gradient norm and rate; every epoch its means and the entropy of
    attention by layer; every EVERY_EPOCHS epochs, from the first one on, the rollout over a few test images.
    """

    def __init__(
        self,
        names: Sequence[TrackerName],
        folder: Path,
        test: Split,
        *,
        config: Mapping[str, object],
        seed: int = 0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.say = say or _say
        self.trackers = [Tracker(name, folder, config=config, say=self.say) for name in names]
        self.watched = test.limit(min(WATCHED, len(test)), seed=seed)
        self._images: Tensor | None = None
        self._attention_failed = False

    def on_step(self, facts: StepMetrics) -> None:
        """Log every tenth update."""
        if facts.step % EVERY_STEPS == 0:
            values = {f"train/{name}": value for name, value in asdict(facts).items() if name not in ("step", "epoch")}
            self._log({name: float(value) for name, value in values.items()}, facts.step)

    def on_epoch(self, metrics: EpochMetrics, model: Model) -> None:
        """Log the epoch's means and the statistics of its attention."""
        if all(tracker.failed for tracker in self.trackers):
            return
        values = {f"epoch/{name}": getattr(metrics, name, None) for name in _EPOCH_METRICS}
        values["epoch/number"] = metrics.epoch + 1
        self._log({name: float(value) for name, value in values.items() if value is not None}, metrics.step)
        if not self._attention_failed:
            try:
                self._log_attention(metrics, model)
            except UnsupportedError:  # a model without attention that can be followed
                self._attention_failed = True
            except Exception as error:
                self._attention_failed = True
                reason = " ".join(str(error).split())
                self.say(f"attention failed and is left out from here on ({reason}); the training goes on")

    def close(self) -> None:
        """Let every tracker write what is not written yet."""
        for tracker in self.trackers:
            tracker.close()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(values, step=step)

    def _log_attention(self, metrics: EpochMetrics, model: Model) -> None:
        """Log the entropy by layer, and every EVERY_EPOCHS epochs the rollout."""
        if self._images is None:
            (batch,) = self.watched.batches(len(self.watched))
            self._images = batch.images
        images = self._images.to(model.device)
        self._log(dict(entropies(statistics(model, images, evidence=False))), metrics.step)
        if metrics.epoch % EVERY_EPOCHS == 0:
            shown = overlay(model, images[:SHOWN], title=f"Attention rollout after epoch {metrics.epoch + 1}")
            for tracker in self.trackers:
                tracker.show("attention_rollout", shown, step=metrics.step)


def entropies(table: Statistics) -> Iterator[tuple[str, float]]:
    """The tracked statistics of each layer, mean over heads: entropy of CLS and patch rows as a share of ln(keys)."""
    measured = {name for name, _ in table.moments.sums}
    for name, statistic in STATISTICS.items():
        if statistic.tracked_as and name in measured:
            for layer, value in enumerate(getattr(table, name).nanmean(1).tolist()):
                if np.isfinite(value):
                    yield f"attention_{statistic.tracked_as}/layer_{layer:02}", value


def overlay(model: Model, images: Images, *, title: str) -> NDArray[np.uint8]:
    """Images beside their attention rollout on one colour scale, as pixels (height, width, 3)."""
    maps = rollout(model, images)
    figure = overlay_rows(
        images=images,
        maps=100 * maps[:, None],
        titles=("rollout",),
        title=f"{title}, share of each patch",
        label="rollout (%)",
    )
    drawn = BytesIO()
    figure.savefig(drawn, format="rgba", dpi="figure")
    pixels = np.frombuffer(drawn.getvalue(), np.uint8).reshape(-1, int(figure.bbox.width), 4)
    return np.ascontiguousarray(pixels[..., :3])


def _say(message: str) -> None:
    print(for_terminal(message), file=sys.stderr)  # noqa: T201
