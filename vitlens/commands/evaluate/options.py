"""The options of `vitlens evaluate`."""

from dataclasses import dataclass

from vitlens.commands.run.options import SharedOptions, data_option, several_models


@dataclass(frozen=True)
class EvaluateOptions(SharedOptions):
    """The options of `vitlens evaluate`.

    data: labelled images (None: digits).
    """

    models: tuple[str, ...] = several_models()
    data: str | None = data_option()
