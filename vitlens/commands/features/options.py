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
    """The models, how their features are read, and what is computed from them.

    ks: numbers of neighbours.
    bank: number of training images; None for all, or with --limit for ten times as many and at
        least 200.
    pool: None for the tokens that the classifier reads.
    tsne: None to map by t-SNE if there are enough images.
    show: names of the data's files, or paths of other images.
    """

    ks: tuple[int, ...] = option(
        "--k",
        "Numbers of nearest neighbours that vote, comma-separated.",
        default=(1, 5, 20),
        metavar="LIST",
        parse=counts,
    )
    probe: bool = option(
        "--probe/--no-probe",
        "Train a linear classifier on every layer.",
        default=True,
    )
    bank: int | None = option(
        "--bank",
        "Use at most N training images, balanced over classes (default: all; with --limit, ten "
        "times as many and at least 200).",
        metavar="N",
        low=2,
    )
    pool: FeaturePool | None = option(
        "--pool",
        "Tokens that form the vector of an image (default: those that the classifier reads).",
        panel=_READ,
    )
    norm: bool = option(
        "--norm/--no-norm",
        "Apply the model's final norm.",
        default=True,
        panel=_READ,
    )
    objective: tuple[str, ...] = option(
        "--objective",
        f"Pretraining objective of a model, if its name does not show it: {', '.join(OBJECTIVES)}; "
        "may be repeated.",
        default=(),
        metavar="ALIAS=OBJECTIVE",
        panel=_READ,
    )
    cache: bool = option(
        "--cache/--no-cache",
        "Keep features in --data-dir for later runs.",
        default=True,
        panel=_READ,
    )
    tsne: bool | None = option(
        "--tsne/--no-tsne",
        "Use t-SNE in addition to PCA (default: if there are enough images).",
        panel=_SPACE,
    )
    perplexity: float = option(
        "--perplexity",
        "Perplexity of t-SNE.",
        default=PERPLEXITY,
        metavar="X",
        low=1,
        panel=_SPACE,
    )
    thumbnails: bool = option(
        "--thumbnails",
        "Also draw maps with thumbnails in place of points.",
        default=False,
        panel=_SPACE,
    )
    query: tuple[str, ...] = option(
        "--query",
        "Show the nearest neighbours of this image; may be repeated (default: of some test "
        "images).",
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
        "Prompt with {} for the class, a file with one prompt a line, or "
        f"{', '.join(TEMPLATE_SETS)}; may be repeated (default: photo, simple).",
        default=("photo", "simple"),
        metavar="TEXT",
        shown=False,
        panel=_LANGUAGE,
    )
    prompts: tuple[str, ...] = option(
        "--prompt",
        "Show the relevance of the image for this text; may be repeated.",
        default=(),
        metavar="TEXT",
        panel=_LANGUAGE,
    )
