"""`vitlens predict`: the five likeliest classes, one line an image."""

from vitlens.cli.options import Data, Images, Model
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import ModelOptions, RunOptions


def predict(
    model: Model, *, images: Images = None, data: Data = None, model_options: ModelOptions, options: RunOptions
) -> None:
    """The five likeliest classes of every image, with their probabilities: one line an image."""
    from vitlens.runs.predict import predict as run

    for row in run(model, images=images, data=data, model_options=model_options, options=options):
        say(row)
