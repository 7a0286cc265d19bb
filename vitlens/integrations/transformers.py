"""A callback for the Trainer of transformers: attention of chosen images in the trainer's log.

from vitlens.integrations.transformers import AttentionCallback
trainer = Trainer(model, args, callbacks=[AttentionCallback("photos/")], ...)
"""

import os
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from vitlens.errors import InputError
from vitlens.integrations.watch import EVERY, AttentionWatch, Measured, Triple

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "expected transformers for vitlens.integrations.transformers, found it missing; type pip "
        "install 'vitlens[hf]'"
    ) from error

_LOGGERS: Final = ("tensorboard", "wandb", "mlflow")  # those that also take pictures


class AttentionCallback(TrainerCallback):  # type: ignore[misc]
    """Log the attention of chosen images every n epochs, to the loggers of `report_to`.

    These are TensorBoard, Weights & Biases and MLflow. It logs the mean attention distance and
    entropy of each layer, and the k-NN accuracy of the images by the features of the last block. A
    sheet shows the attention of each layer and the rollout.

    images: some tens, in any form that `vitlens.images` takes.
    labels: (n,), None for those of a Split or of class folders; without labels there is no k-NN
        accuracy.
    every: epochs between two measurements, from the first epoch on; the last one is always
        measured.
    image_size: (height, width) in pixels, or both at once.
    mean, std: of the training's normalisation, for pixels in [0, 1].

    If image_size, mean and std are None, those of the trainer's image processor
    (`processing_class`) and of the model's configuration are taken. Only the first process
    measures. Raises InputError for an interval below 1.
    """

    def __init__(
        self,
        images: Any,
        *,
        labels: Tensor | None = None,
        every: int = EVERY,
        image_size: int | tuple[int, int] | None = None,
        mean: Triple | None = None,
        std: Triple | None = None,
    ) -> None:
        self._watch = AttentionWatch(images, labels, every)
        self._image_size = image_size
        self._mean = mean
        self._std = std
        self._loggers: tuple[str, ...] = ()
        self._writer: Any = None  # of TensorBoard

    def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
        """Read the structure of the model and the images.

        Raises InputError if no logger takes pictures, or the normalisation is not known, and what
        `vitlens.wrap` raises.
        """
        if not state.is_world_process_zero:
            return
        self._loggers = tuple(name for name in _LOGGERS if name in args.report_to)
        if not self._loggers:
            raise InputError(
                f"expected report_to with {', '.join(_LOGGERS[:-1])} or {_LOGGERS[-1]}, found "
                f"{args.report_to}"
            )
        model = trainer["model"]
        processor = trainer.get("processing_class")
        # the user's values come first
        mean = self._mean or getattr(processor, "image_mean", None)
        std = self._std or getattr(processor, "image_std", None)
        config = getattr(model, "config", None)  # a module of another library has none
        size = self._image_size or getattr(config, "image_size", None)
        if not (mean and std and size):
            raise InputError(
                "expected the preprocessing of the training, found no image processor as "
                "processing_class; give AttentionCallback mean=, std= and image_size="
            )
        self._watch.begin(model, size, _triple(mean), _triple(std))
        if "tensorboard" in self._loggers:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(_tensorboard_folder(Path(args.output_dir))))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
        """Measure and log where it is due."""
        epoch = round(state.epoch)
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        if self._watch.is_due(epoch, last=is_last):
            self._watch.log(epoch, lambda measured: self._write(measured, state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
        """Close the file for TensorBoard."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, measured: Measured, step: int) -> None:
        if self._writer is not None:
            for name, number in measured.numbers.items():
                self._writer.add_scalar(name, number, step)
            for name, pixels in measured.pictures.items():
                self._writer.add_image(name, pixels, step, dataformats="HWC")
            self._writer.flush()
        if "wandb" in self._loggers:
            _write_to_wandb(measured, step)
        if "mlflow" in self._loggers:
            import mlflow

            mlflow.log_metrics(dict(measured.numbers), step=step)
            for name, pixels in measured.pictures.items():
                # else a run that ends at once loses its last picture
                mlflow.log_image(pixels, key=name, step=step, synchronous=True)


def _write_to_wandb(measured: Measured, step: int) -> None:
    """Log to the run of the trainer, by its axis of steps."""
    import wandb

    values: dict[str, Any] = dict(measured.numbers)
    for name, pixels in measured.pictures.items():
        values[name] = wandb.Image(pixels)
    wandb.log(values | {"train/global_step": step})


def _tensorboard_folder(output: Path) -> Path:
    """Return the folder to which the trainer's TensorBoardCallback writes.

    That callback has begun before this one, so its file is the newest.
    """
    folder = os.environ.get("TENSORBOARD_LOGGING_DIR")
    if folder:
        return Path(folder).expanduser()
    files = list(output.glob("runs/*/events.out.tfevents.*"))
    if not files:
        return output / "runs"
    return max(files, key=lambda file: file.stat().st_mtime).parent


def _triple(values: Any) -> Triple:
    """Return three numbers, from a list, or from one number for all channels."""
    numbers = [values] * 3 if isinstance(values, int | float) else list(values)
    red, green, blue = (float(number) for number in numbers)
    return red, green, blue
