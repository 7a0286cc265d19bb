"""Log a training to TensorBoard and Weights & Biases, through accelerate's trackers (`vitlens train
--track`).

A tracker opens with its first value, after the processes have joined. If one fails, this is printed
once, and the training goes on without it. snapshots.py has what is measured.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from vitlens.analysis.attention.chain import require_chain
from vitlens.data.split import Split
from vitlens.display import for_terminal
from vitlens.errors import InputError, UnsupportedError
from vitlens.models.model import Model
from vitlens.names import TrackerName
from vitlens.snapshots import (
    Histogram,
    Pixels,
    attention_sheet,
    attention_snapshot,
    parameter_histograms,
    rollout_sheet,
)
from vitlens.training.metrics import EpochMetrics, StepMetrics

EVERY_STEPS: Final = 10  # updates between two logs of single updates
EVERY_EPOCHS: Final = 5  # epochs between two pictures
WATCHED: Final = 16  # test images of which attention is measured
SHOWN: Final = 4  # images of them in a picture
_EPOCH_METRICS: Final = (
    "train_loss",
    "train_accuracy",
    "test_loss",
    "test_accuracy",
    "images_per_second",
    "gradient_norm",
)
_WANDB_VARIABLES: Final = (
    "WANDB_MODE",
    "WANDB_API_KEY",
)  # with either set, the user has chosen how W&B runs


def require_trackers(names: Sequence[TrackerName]) -> None:
    """Raise InputError, with what to type, unless the library of every tracker is installed."""
    for name in names:
        if find_spec(name) is None:
            raise InputError(
                f"expected the library of --track {name}, found it not installed; type pip install "
                f"{name}"
            )


class TrackerWatcher:
    """A Watcher that logs a training to one tracker.

    It logs loss, learning rate, gradient norm and rate every EVERY_STEPS updates; means, statistics
    of attention by layer, and histograms of weights and gradients every epoch; and the attention
    and rollout of a few test images every EVERY_EPOCHS epochs, from the first one on.

    name: the name of the tracker.
    folder: the folder of the run, which gets tensorboard/ or wandb/.
    test: test images, of which WATCHED are drawn.
    config: settings of the run, for the tracker's table.
    say: called once with a message for each part that fails.
    """

    def __init__(
        self,
        name: TrackerName,
        folder: Path,
        test: Split,
        *,
        config: Mapping[str, object],
        seed: int = 0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.folder = folder
        self.config = config
        self.say = say or _say
        self.watched = test.limit(min(WATCHED, len(test)), seed=seed)
        self._backend: Any = None
        self._images: Tensor | None = None
        # of the last update of the epoch, by parameter, on the CPU
        self._gradients: dict[str, Tensor] = {}
        self._failed: set[str] = set()

    def on_step(self, facts: StepMetrics) -> None:
        """Log every EVERY_STEPS-th update."""
        if facts.step % EVERY_STEPS != 0:
            return
        values = {}
        for name, value in asdict(facts).items():
            if name not in ("step", "epoch"):
                values[f"train/{name}"] = float(value)
        self._log(values, facts.step)

    def on_gradients(self, module: nn.Module) -> None:
        """Keep the gradients until the end of the epoch."""
        self._gradients = {}
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                self._gradients[name] = parameter.grad.detach().to("cpu", copy=True)

    def on_epoch(self, metrics: EpochMetrics, model: Model) -> None:
        """Log the epoch's means, the statistics of its attention, its weights and gradients."""
        values = {"epoch/number": float(metrics.epoch + 1)}
        for name in _EPOCH_METRICS:
            value = getattr(metrics, name, None)
            if value is not None:
                values[f"epoch/{name}"] = float(value)
        for name, value in metrics.measures.items():
            values[f"features/{name}"] = float(value)
        self._log(values, metrics.step)
        self._attempt("attention", lambda: self._log_attention(metrics, model))
        self._attempt("histograms", lambda: self._log_parameters(metrics.step, model))

    def close(self) -> None:
        """Flush and close the tracker."""
        if self._backend is None:
            return
        try:  # also after a failure, so that what was logged before it is written
            # not by Accelerator.end_training, which ends the group of processes as well
            self._backend.finish()
        except Exception as error:
            self._report(self.name, error)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self._attempt(self.name, lambda: self._open(step).log(dict(values), step=step))

    def _log_histograms(self, histograms: Mapping[str, Histogram], step: int) -> None:
        self._attempt(
            self.name,
            lambda: _log_histograms(self.name, self._open(step).tracker, histograms, step),
        )

    def _log_pictures(self, pictures: Mapping[str, Pixels], step: int) -> None:
        settings = {}
        if self.name == "tensorboard":  # W&B takes no other form
            settings["dataformats"] = "NHWC"
        batches = {name: pixels[None] for name, pixels in pictures.items()}
        self._attempt(
            self.name, lambda: self._open(step).log_images(batches, step=step, **settings)
        )

    def _log_attention(self, metrics: EpochMetrics, model: Model) -> None:
        """Log the statistics by layer, and every EVERY_EPOCHS epochs pictures of the attention."""
        if self._images is None:
            (batch,) = self.watched.batches(len(self.watched))
            self._images = batch.images
        images = self._images.to(model.device)
        step = metrics.step
        snapshot = attention_snapshot(model, images)
        self._log(snapshot.scalars, step)
        self._log_histograms(snapshot.histograms, step)
        if metrics.epoch % EVERY_EPOCHS == 0:
            self._attempt("pictures", lambda: self._log_sheets(metrics, model, images[:SHOWN]))

    def _log_sheets(self, metrics: EpochMetrics, model: Model, images: Tensor) -> None:
        after = f"after epoch {metrics.epoch + 1}, share of each patch"
        pictures = {"attention": attention_sheet(model, images, f"Attention {after}")}
        if require_chain.is_met(model):
            pictures["attention_rollout"] = rollout_sheet(
                model, images, f"Attention rollout {after}"
            )
        self._log_pictures(pictures, metrics.step)

    def _log_parameters(self, step: int, model: Model) -> None:
        """Log histograms of the tested weights, and of the gradients of the last update."""
        blocks = model.anatomy.blocks
        weights = dict(model.module.named_parameters())
        histograms = parameter_histograms("weights", weights, blocks)
        histograms |= parameter_histograms("gradients", self._gradients, blocks)
        self._gradients = {}
        self._log_histograms(histograms, step)

    def _attempt(self, what: str, act: Callable[[], object]) -> None:
        """Call `act` unless this part, or the tracker, has failed before.

        what: the part, in the message about its failure. A model without attention is not reported
        as a failure.
        """
        if self._failed & {what, self.name}:
            return
        try:
            act()
        except Exception as error:
            self._report(what, error)

    def _report(self, what: str, error: Exception) -> None:
        """Leave a part out from here on, and say so once."""
        is_reported = what in self._failed
        self._failed.add(what)
        if is_reported or isinstance(error, UnsupportedError):
            return
        reason = " ".join(str(error).split()) or type(error).__name__
        self.say(f"{what} failed and is left out from here on ({reason}); the training goes on")

    def _open(self, step: int) -> Any:
        """Return the library's tracker, which begins at this step."""
        if self._backend is None:
            # not by Accelerator(log_with=...): a second Accelerator would share, and change, the
            # first one's state
            from accelerate.tracking import TensorBoardTracker, WandBTracker

            if self.name == "tensorboard":
                # a resumed run overwrites what was logged after its checkpoint
                resumed = {"purge_step": step} if step > 1 else {}
                backend: Any = TensorBoardTracker("tensorboard", str(self.folder), **resumed)
            else:
                backend = WandBTracker("vitlens", **_wandb_settings(self.folder))
            backend.start()
            self._backend = backend  # from here on, `close` finishes it
            self._backend.store_init_configuration(_flat(self.config))
        return self._backend


def _log_histograms(
    name: TrackerName, tracker: Any, histograms: Mapping[str, Histogram], step: int
) -> None:
    """Log histograms by name. tracker: a SummaryWriter of TensorBoard, or a run of W&B."""
    if name == "wandb":
        import wandb

        values = {}
        for title, histogram in histograms.items():
            values[title] = wandb.Histogram(np_histogram=(histogram.counts, histogram.edges))
        tracker.log(values, step=step)
        return
    for title, histogram in histograms.items():
        tracker.add_histogram_raw(
            title,
            min=histogram.edges[0],
            max=histogram.edges[-1],
            num=histogram.counts.sum(),
            sum=histogram.total,
            sum_squares=histogram.squares,
            bucket_limits=histogram.edges[1:].tolist(),
            bucket_counts=histogram.counts.tolist(),
            global_step=step,
        )


def _say(message: str) -> None:
    print(for_terminal(message), file=sys.stderr)  # noqa: T201


def _wandb_settings(folder: Path) -> dict[str, object]:
    """Return arguments of wandb.init: files in the run's folder, nothing printed, offline without
    an account.
    """
    import wandb

    settings: dict[str, object] = {
        "name": folder.name,
        "dir": str(folder),
        "settings": wandb.Settings(silent=True, console="off"),
    }
    if not _has_wandb_account():
        settings["mode"] = "offline"
    return settings


def _has_wandb_account() -> bool:
    """Return True if the user has logged in to W&B or chosen how it runs."""
    if any(os.environ.get(name) for name in _WANDB_VARIABLES):
        return True
    for name in (".netrc", "_netrc"):  # where `wandb login` stores an account
        path = Path.home() / name
        if path.is_file() and "wandb" in path.read_text(errors="replace"):
            return True
    return False


def _flat(value: Mapping[str, object], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Flatten nested settings to dotted names; values that trackers cannot hold become text."""
    flat: dict[str, bool | int | float | str] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flat(item, f"{prefix}{name}.")
        else:
            flat[prefix + name] = item if isinstance(item, bool | int | float | str) else str(item)
    return flat
