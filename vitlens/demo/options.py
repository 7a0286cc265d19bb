"""The options of `vitlens demo`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import argument, bundle, option
from vitlens.commands.run.options import ModelOptions, images_option


@dataclass(frozen=True)
class DemoOptions:
    """The options of the page.

    models: from which visitors choose (empty: the bundled pair).
    images: examples (empty: digits for models of digits, two photographs for others).
    port: None for a free one.
    browser: True to open the page in a browser.
    """

    models: tuple[str, ...] = argument(
        "MODEL...",
        "The models to choose from, each NAME, ALIAS=NAME or NAME@WEIGHTS (default: vit-digits and "
        "cnn-digits).",
        default=(),
        complete="model",
    )
    images: tuple[str, ...] = images_option()
    port: int | None = option(
        "--port",
        "Port of the page (default: a free one from 7860).",
        default=None,
        metavar="N",
        low=1,
        high=65535,
    )
    browser: bool = option("--browser/--no-browser", "Open the page in a browser.", default=True)
    device: str = option(
        "--device", "Device: auto, cpu, cuda, cuda:N or mps.", default="auto", metavar="NAME"
    )
    model_options: ModelOptions = bundle(ModelOptions)
