"""What `vitlens features` was asked for; free of torch, so that the command line can name it at once."""

from dataclasses import dataclass

from vitlens.names import FeaturePool


@dataclass(frozen=True)
class FeatureChoices:
    """ks: neighbours that vote; pool: what an image's vector is of (None: what the classifier reads); norm: behind the
    model's final norm; bank: training images at most (None: all, or ten times --limit and at least 200); probe: a
    linear classifier on every layer; tsne: True, False, or None for where there are images enough; perplexity: of
    t-SNE; thumbnails: small images in place of points; query: files whose neighbours are looked for; show: images that
    alone are drawn, names of the data's files or paths of others (none: some test images); templates: prompts with {}
    in place of a class, or names of sets; prompts: texts whose relevance over the image is shown; cache: keep features
    on disk.
    """

    ks: tuple[int, ...] = (1, 5, 20)
    pool: FeaturePool | None = None
    norm: bool = True
    bank: int | None = None
    probe: bool = True
    tsne: bool | None = None
    perplexity: float = 30.0
    thumbnails: bool = False
    query: tuple[str, ...] = ()
    show: tuple[str, ...] = ()
    templates: tuple[str, ...] = ("photo", "simple")
    prompts: tuple[str, ...] = ()
    cache: bool = True
