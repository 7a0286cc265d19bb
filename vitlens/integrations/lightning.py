"""A callback for the Trainer of Lightning: attention of chosen images in the trainer's loggers.

from vitlens.integrations.lightning import AttentionCallback
Trainer(callbacks=[AttentionCallback("photos/", image_size=224, mean=MEAN, std=STD)])
"""

from typing import Any

from torch import Tensor

from vitlens.errors import InputError
from vitlens.integrations.watch import EVERY, AttentionWatch, Measured, Triple

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError(
            "expected lightning for vitlens.integrations.lightning, found it missing; type pip "
            "install 'vitlens[lightning]'"
        ) from error


class AttentionCallback(Callback):  # type: ignore[misc]
    """Log the attention of chosen images every n epochs, to all loggers of the trainer.

    Numbers go to every logger, pictures to those of TensorBoard, Weights & Biases and MLflow.
    It logs the mean attention distance and entropy of each layer, and the k-NN accuracy of the
    images by the features of the last block. A sheet shows the attention of each layer and the
    rollout.

    images: some tens, in any form that `vitlens.images` takes.
    image_size: (height, width) in pixels, or both at once.
    mean, std: of the training's normalisation, for pixels in [0, 1].
    labels: (n,), None for those of a Split or of class folders; without labels there is no k-NN
        accuracy.
    module: the attribute of the LightningModule that maps images to logits, such as "net" ("": the
        LightningModule itself does).
    every: epochs between two measurements, from the first epoch on; the last one is always
        measured. Only the first process measures.

    Raises InputError for an interval below 1.
    """

    def __init__(
        self,
        images: Any,
        *,
        image_size: int | tuple[int, int],
        mean: Triple,
        std: Triple,
        labels: Tensor | None = None,
        module: str = "",
        every: int = EVERY,
    ) -> None:
        self._watch = AttentionWatch(images, labels, every)
        self._image_size = image_size
        self._mean = mean
        self._std = std
        self._module = module

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Read the structure of the model and the images.

        Raises InputError for a trainer without loggers and for a module that does not exist, and
        what `vitlens.wrap` raises.
        """
        if not trainer.is_global_zero:
            return
        if not trainer.loggers:
            raise InputError("expected a trainer with a logger, found none; see its logger=")
        try:
            module = pl_module.get_submodule(self._module)
        except AttributeError as error:
            names = ", ".join(name for name, _ in pl_module.named_children())
            raise InputError(f"expected module= one of {names}, found {self._module!r}") from error
        self._watch.begin(module, self._image_size, self._mean, self._std)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Measure and log where it is due."""
        epoch = trainer.current_epoch + 1
        reaches_max_steps = 0 <= trainer.max_steps <= trainer.global_step  # -1: no limit
        is_last = trainer.should_stop or epoch == trainer.max_epochs or reaches_max_steps
        if self._watch.is_due(epoch, last=is_last):
            self._watch.log(epoch, lambda measured: _write(trainer, measured))


def _write(trainer: Any, measured: Measured) -> None:
    step = trainer.global_step
    for logger in trainer.loggers:
        logger.log_metrics(dict(measured.numbers), step=step)
        kind = type(logger).__name__
        for name, pixels in measured.pictures.items():
            if kind == "TensorBoardLogger":
                logger.experiment.add_image(name, pixels, step, dataformats="HWC")
            elif kind == "WandbLogger":
                logger.log_image(name, [pixels], step=step)
            elif kind == "MLFlowLogger":
                # else a run that ends at once loses its last picture
                logger.experiment.log_image(
                    logger.run_id, image=pixels, key=name, step=step, synchronous=True
                )
