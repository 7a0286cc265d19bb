"""The options of `vitlens features`."""

from dataclasses import dataclass

from vitlens.commands.run.flags import option
from vitlens.commands.run.options import ModelsOnImages
from vitlens.commands.run.parsing import counts, names_of
from vitlens.names import OBJECTIVES, PERPLEXITY, TEMPLATE_SETS, FeaturePool

_READ = "How features are read"
_SPACE = "Maps and retrieval"
_LANGUAGE = "Language-image models (open-clip:ARCH/TAG)"


@dataclass(frozen=True)
class FeaturesOptions(ModelsOnImages):
    """The features of models at every layer: accuracy of simple classifiers on them, maps, similarity, retrieval.

    None: bank takes all training images, or ten times --limit and at least 200; pool the tokens that the classifier
    reads; tsne runs where there are enough images. show: names of the data's files or paths of others.
    """

    ks: tuple[int, ...] = option(
        "--k", "Neighbours that vote, comma-separated.", default=(1, 5, 20), metavar="LIST", parse=counts
    )
    probe: bool = option("--probe/--no-probe", "A linear classifier on every layer.", default=True)
    bank: int | None = option(
        "--bank",
        "Training images at most, as many of each class (default: all; with --limit ten times that, 200 at least).",
        metavar="N",
        low=2,
    )
    pool: FeaturePool | None = option(
        "--pool", "Tokens of an image's vector (default: what the classifier reads).", panel=_READ
    )
    norm: bool = option("--norm/--no-norm", "Apply the model's final norm.", default=True, panel=_READ)
    objective: tuple[str, ...] = option(
        "--objective",
        f"What a model was pretrained for, where its name does not tell: {', '.join(OBJECTIVES)}; may be repeated.",
        default=(),
        metavar="ALIAS=OBJECTIVE",
        panel=_READ,
    )
    cache: bool = option(
        "--cache/--no-cache", "Keep features below --data-dir for later runs.", default=True, panel=_READ
    )
    tsne: bool | None = option(
        "--tsne/--no-tsne", "t-SNE as well as PCA (default: where there are enough images).", panel=_SPACE
    )
    perplexity: float = option(
        "--perplexity", "Perplexity of t-SNE.", default=PERPLEXITY, metavar="X", low=1, panel=_SPACE
    )
    thumbnails: bool = option("--thumbnails", "Also draw thumbnails in place of points.", default=False, panel=_SPACE)
    query: tuple[str, ...] = option(
        "--query",
        "Image whose nearest neighbours are shown; may be repeated (default: some test images).",
        default=(),
        metavar="IMAGE",
        panel=_SPACE,
    )
    show: tuple[str, ...] = option(
        "--show",
        "Draw only these images: file names of the data, or paths (default: some test images).",
        default=(),
        metavar="LIST",
        parse=names_of,
        panel=_SPACE,
    )
    templates: tuple[str, ...] = option(
        "--clip-templates",
        f"Prompt with {{}} for the class, a file of such lines, or {', '.join(TEMPLATE_SETS)}; may be repeated "
        "(default: photo, simple).",
        default=("photo", "simple"),
        metavar="TEXT",
        shown=False,
        panel=_LANGUAGE,
    )
    prompts: tuple[str, ...] = option(
        "--prompt",
        "Text whose relevance over the image is shown; may be repeated.",
        default=(),
        metavar="TEXT",
        panel=_LANGUAGE,
    )
