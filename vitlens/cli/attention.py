"""`vitlens attention`: where every head looks."""

import typer

from vitlens.cli.options import Data, Images, Model
from vitlens.runs.options import ModelOptions, RunOptions


def attention(
    model: Model, *, images: Images = None, data: Data = None, model_options: ModelOptions, options: RunOptions
) -> None:
    """Attention maps by layer and head, their evolution over the layers, and the position embeddings."""
    from vitlens.runs.attention import attention as run

    typer.echo(run(model, images=images, data=data, model_options=model_options, options=options))
