"""The options of `vitlens predict`."""

from dataclasses import dataclass

from vitlens.commands.run.options import SharedOptions, data_option, images_option, one_model


@dataclass(frozen=True)
class PredictOptions(SharedOptions):
    """Model and images; only --out writes a report folder."""

    model: str = one_model()
    images: tuple[str, ...] = images_option()
    data: str | None = data_option()
