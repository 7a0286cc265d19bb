"""`vitlens features`: what the features know."""

from typing import Annotated

import typer

from vitlens.cli.options import Data, Images, Models
from vitlens.cli.terminal import say
from vitlens.commands.scaffold.options import ModelOptions, RunOptions
from vitlens.commands.scaffold.parsing import counts, names_of
from vitlens.names import TEMPLATE_SETS, FeaturePool
from vitlens.runs.features_choices import FeatureChoices

_READ, _SPACE, _LANGUAGE = "How features are read", "Maps and retrieval", "Models that know texts (open-clip:ARCH/TAG)"


def features(
    models: Models,
    *,
    data: Data = None,
    images: Images = None,
    k: Annotated[str, typer.Option("--k", metavar="LIST", help="Neighbours that vote, comma-separated.")] = "1,5,20",
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="A linear classifier on every layer.")] = True,
    bank: Annotated[
        int | None,
        typer.Option(
            "--bank",
            metavar="N",
            min=2,
            help="Training images at most, as many of each class (default: all; with --limit ten times that, "
            "200 at least).",
            show_default=False,
        ),
    ] = None,
    pool: Annotated[
        FeaturePool | None,
        typer.Option(
            "--pool",
            help="An image's vector (default: what the classifier reads).",
            rich_help_panel=_READ,
            show_default=False,
        ),
    ] = None,
    norm: Annotated[
        bool, typer.Option("--norm/--no-norm", help="Behind the model's final norm.", rich_help_panel=_READ)
    ] = True,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache", help="Keep features below --data-dir for later runs.", rich_help_panel=_READ
        ),
    ] = True,
    tsne: Annotated[
        bool | None,
        typer.Option(
            "--tsne/--no-tsne",
            help="t-SNE beside PCA (default: where there are images enough).",
            rich_help_panel=_SPACE,
            show_default=False,
        ),
    ] = None,
    perplexity: Annotated[
        float, typer.Option("--perplexity", metavar="X", min=1, help="Of t-SNE.", rich_help_panel=_SPACE)
    ] = 30.0,
    thumbnails: Annotated[
        bool, typer.Option("--thumbnails", help="Small pictures in place of points, too.", rich_help_panel=_SPACE)
    ] = False,
    query: Annotated[
        list[str] | None,
        typer.Option(
            "--query",
            metavar="IMAGE",
            help="Whose nearest neighbours are shown; may be repeated (default: some test images).",
            rich_help_panel=_SPACE,
            show_default=False,
        ),
    ] = None,
    show: Annotated[
        str | None,
        typer.Option(
            "--show",
            metavar="LIST",
            help="Draw these images and no others: file names of the data, or paths (default: some test images).",
            rich_help_panel=_SPACE,
            show_default=False,
        ),
    ] = None,
    clip_templates: Annotated[
        list[str] | None,
        typer.Option(
            "--clip-templates",
            metavar="TEXT",
            help=f"With {{}} for the class, a file of such lines, or {', '.join(TEMPLATE_SETS)}; may be repeated "
            "(default: photo, simple).",
            rich_help_panel=_LANGUAGE,
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            metavar="TEXT",
            help="Shown: what of the image speaks for it; may be repeated.",
            rich_help_panel=_LANGUAGE,
            show_default=False,
        ),
    ] = None,
    model_options: ModelOptions,
    options: RunOptions,
) -> None:
    """k-NN, linear probe, t-SNE, CKA, patch colours, retrieval, layer by layer; zero-shot by models that know texts."""
    default = FeatureChoices()
    choices = FeatureChoices(
        ks=counts("--k", k),
        pool=pool,
        norm=norm,
        bank=bank,
        probe=probe,
        tsne=tsne,
        perplexity=perplexity,
        thumbnails=thumbnails,
        query=tuple(query or ()),
        show=() if show is None else names_of("--show", show),
        templates=tuple(clip_templates or default.templates),
        prompts=tuple(prompt or ()),
        cache=cache,
    )
    from vitlens.runs.features import features as run

    written = run(models, data=data, images=images, choices=choices, model_options=model_options, options=options)
    if written is not None:  # of several processes the first alone has something to say
        say(written)
