"""`vitlens evaluate`: how often a model is right, and where it is not."""

from vitlens.cli.options import Data, Models
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import ModelOptions, RunOptions


def evaluate(models: Models, *, data: Data = None, model_options: ModelOptions, options: RunOptions) -> None:
    """Accuracy with its interval, per class, confusion, calibration and a grid of predictions."""
    from vitlens.runs.evaluate import evaluate as run

    written = run(models, data=data or "digits", model_options=model_options, options=options)
    if written is not None:  # of several processes the first alone has something to say
        say(written)
