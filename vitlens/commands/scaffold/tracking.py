"""`vitlens train --track`: what trackers are told of a training, and how its attention is looked at on the way.

Names bear numbers from 0, as those in results.json do: attention_entropy/patches/layer_00.
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
from vitlens.commands.scaffold.trackers import Tracker
from vitlens.data.split import Split
from vitlens.display import for_terminal
from vitlens.errors import UnsupportedError
from vitlens.figures.overlays import overlay_rows
from vitlens.models.model import Model
from vitlens.names import TrackerName
from vitlens.shapes import Images
from vitlens.training.metrics import EpochMetrics, StepFacts

EVERY_STEPS = 10  # between numbers of single updates
EVERY_EPOCHS = 5  # between pictures
WATCHED = 16  # test images whose attention is looked at
SHOWN = 4  # of them, in a picture
_TOLD = ("train_loss", "train_accuracy", "test_loss", "test_accuracy", "images_per_second", "gradient_norm")


class TrackerWatcher:
    """A Watcher that tells one or more trackers how a training goes.

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
        self._blind = False  # after a look at attention that failed

    def on_step(self, facts: StepFacts) -> None:
        """The numbers of one update in so many."""
        if facts.step % EVERY_STEPS == 0:
            told = {f"train/{name}": value for name, value in asdict(facts).items() if name not in ("step", "epoch")}
            self._log({name: float(value) for name, value in told.items()}, facts.step)

    def on_epoch(self, metrics: EpochMetrics, model: Model) -> None:
        """The epoch's means, and what its attention is like."""
        if all(tracker.failed for tracker in self.trackers):
            return
        told = {f"epoch/{name}": getattr(metrics, name, None) for name in _TOLD}
        told["epoch/number"] = metrics.epoch + 1
        self._log({name: float(value) for name, value in told.items() if value is not None}, metrics.step)
        if not self._blind:
            try:
                self._look(metrics, model)
            except UnsupportedError:  # a model without attention that can be followed
                self._blind = True
            except Exception as error:
                self._blind = True
                self.say(f"attention is tracked no more ({' '.join(str(error).split())}); the training goes on")

    def close(self) -> None:
        """Let every tracker write out what is left."""
        for tracker in self.trackers:
            tracker.close()

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self.trackers:
            tracker.log(values, step=step)

    def _look(self, metrics: EpochMetrics, model: Model) -> None:
        """Entropy by layer; where it is time, a picture."""
        if self._images is None:
            (batch,) = self.watched.batches(len(self.watched))
            self._images = batch.images
        images = self._images.to(model.device)
        self._log(dict(entropies(statistics(model, images))), metrics.step)
        if metrics.epoch % EVERY_EPOCHS == 0:
            shown = overlay(model, images[:SHOWN], title=f"Attention rollout after epoch {metrics.epoch + 1}")
            for tracker in self.trackers:
                tracker.show("attention_rollout", shown, step=metrics.step)


def entropies(table: Statistics) -> Iterator[tuple[str, float]]:
    """Every statistic that is tracked, of each layer, mean over heads: entropy as a share of ln(keys) of both rows."""
    measured = {name for name, _ in table.moments.sums}
    for name, statistic in STATISTICS.items():
        if statistic.tracked_as and name in measured:
            for layer, value in enumerate(getattr(table, name).nanmean(1).tolist()):
                if np.isfinite(value):
                    yield f"attention_{statistic.tracked_as}/layer_{layer:02}", value


def overlay(model: Model, images: Images, *, title: str) -> NDArray[np.uint8]:
    """Images beside their attention rollout with one scale of colours, as pixels (height, width, 3)."""
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
