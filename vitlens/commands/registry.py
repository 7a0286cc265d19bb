"""All commands, one entry each.

The command line, reports, `Model.supports`, tests, docs and completion read these entries.

A command is the folder `vitlens/commands/<word>/`, with these modules:

- options.py: a dataclass `<Word>Options`, of which its command line is made
- record.py: `<Word>Record`, what it writes
- measure.py: `measure`, from options to the written record
- report.py: `REPORT`, from record to document

Each module is imported on first use.

The runs of a command may write records of several classes. Its record.py then has `RECORDS`, all of
these classes, and `record_class`, which returns the class of a run from the options in config.json.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal

from vitlens.references import provided

if TYPE_CHECKING:
    from vitlens.record import Contents, Record
    from vitlens.report.document import Document

Group = Literal["Inspect", "Train and evaluate", "Explain and test", "Reports and lists"]


@dataclass(frozen=True)
class Command:
    """One command.

    word: its name on the command line.
    help: its first line in --help.
    example: a line that can be typed at once.
    group: the heading under which --help lists it.
    needs: what a model must have for it (commands/needs.py), None if it takes no model.
    reports: True if it leaves a report folder. (`report` is the function that makes its report.)
    untrained: True if it needs no trained weights.
    html: True if it writes report.html unless --no-html is given.
    serves: True if it serves a page until it is stopped, from which visitors export report folders.
    portfolio: True if `--portfolio` writes a longer report of its runs.
    package: the package of its modules, "" for vitlens.commands.<word>.
    """

    word: str
    help: str
    example: str
    group: Group
    needs: tuple[str, ...] | None = None
    reports: bool = True
    untrained: bool = False
    html: bool = False
    serves: bool = False
    portfolio: bool = False
    package: str = ""

    @property
    def options(self) -> type:
        """Return the dataclass of its options."""
        return self._part("options", f"{self.word.capitalize()}Options")  # type: ignore[no-any-return]

    @property
    def contents(self) -> "Contents":
        """Return all that its runs may write."""
        from vitlens.record import joined_contents

        return joined_contents([record.contents() for record in self.records])

    @property
    def records(self) -> "tuple[type[Record], ...]":
        """Return the classes of the records that its runs write."""
        module = self._module("record")
        if hasattr(module, "RECORDS"):
            return tuple(module.RECORDS)
        return (getattr(module, f"{self.word.capitalize()}Record"),)

    def record_class(self, options: Mapping[str, Any]) -> "type[Record]":
        """Return the class of the record of one run.

        options: its options, as in its config.json.
        """
        module = self._module("record")
        if hasattr(module, "record_class"):
            return module.record_class(options)  # type: ignore[no-any-return]
        return self.records[0]

    @property
    def measure(self) -> "Callable[[Any], object]":
        """Return the function that runs the command with its options."""
        return self._part("measure", "measure")  # type: ignore[no-any-return]

    @property
    def report(self) -> "Callable[[Any], Document]":
        """Return the function from its record to the document."""
        return self._part("report", "REPORT")  # type: ignore[no-any-return]

    @property
    def portfolio_report(self) -> "Callable[[Any], Document]":
        """Return the function from its record to the portfolio report, if it has one."""
        return self._part("portfolio", "portfolio")  # type: ignore[no-any-return]

    def _part(self, file: str, name: str) -> Any:
        """Return what has this name in a module of the command."""
        return getattr(self._module(file), name)

    def _module(self, file: str) -> ModuleType:
        package = self.package or f"vitlens.commands.{self.word}"
        return import_module(f"{package}.{file}")


_ENTRIES: Final = (
    Command(
        "look",
        "One photograph, one page: the prediction, where the evidence lies, the heads "
        "that matter; the command to try first.",
        "vitlens look cat.jpg",
        "Inspect",
        needs=("classifier",),
        html=True,
    ),
    Command(
        "study",
        "Every analysis of a ViT and a CNN (yours or the bundled pair) in one report; --kind "
        "trains one comparison.",
        "vitlens study",
        "Inspect",
        needs=("classes", "maps", "chain", "statistics", "heads", "features"),
        untrained=True,
        html=True,
        portfolio=True,
    ),
    Command(
        "audit",
        "One model judged for a release: accuracy, calibration, maps, attacks, corruptions, "
        "attention; for CI --junit.",
        "vitlens audit vit-digits --at-least accuracy=0.8 --budget 1",
        "Inspect",
        needs=("classes",),
    ),
    Command(
        "predict",
        "The five most probable classes of every image, one line an image.",
        "vitlens predict vit-digits --limit 3",
        "Train and evaluate",
        needs=("classes",),
    ),
    Command(
        "train",
        "Train a preset from scratch, or fine-tune a trained model; the run folder is a MODEL for "
        "every other command.",
        "vitlens train vit-micro --epochs 1",
        "Train and evaluate",
        needs=("new head",),
        untrained=True,
    ),
    Command(
        "evaluate",
        "Accuracy with its interval, accuracy per class, confusion, calibration and a grid of "
        "predictions.",
        "vitlens evaluate vit-digits cnn-digits",
        "Train and evaluate",
        needs=("classes",),
    ),
    Command(
        "attention",
        "Attention maps by layer and head, their change over the layers, and the position "
        "embeddings.",
        "vitlens attention vit-digits",
        "Inspect",
        needs=("maps",),
    ),
    Command(
        "rollout",
        "Maps of attention over all layers: rollout (Abnar & Zuidema 2020), relevance (Chefer et "
        "al. 2021) and others.",
        "vitlens rollout vit-digits --fusion mean,max,min",
        "Inspect",
        needs=("chain",),
    ),
    Command(
        "stats",
        "Attention distance, entropy, sparsity, sinks and specialisation of every head, also over "
        "a training.",
        "vitlens stats vit-digits --limit 100",
        "Inspect",
        needs=("statistics",),
    ),
    Command(
        "head",
        "One head: what determines its attention, where it attends and what it writes, "
        "each tested; what breaks without it.",
        "vitlens head vit-digits L5.H2 --limit 100",
        "Inspect",
        needs=("statistics", "heads"),
    ),
    Command(
        "sae",
        "A sparse autoencoder of a layer: trained, measured against baselines, its latents named "
        "and tested.",
        "vitlens sae vit-digits --layer 2 --limit 100 --tokens 20000",
        "Inspect",
        needs=("patch tokens",),
        html=True,
    ),
    Command(
        "ablate",
        "What ablating each head, MLP and block changes, with intervals; removal in order of "
        "importance, and pruning.",
        "vitlens ablate vit-digits --limit 100",
        "Explain and test",
        needs=("classes", "heads"),
    ),
    Command(
        "compare",
        "Two models on the same images: paired test, errors, maps side by side, shape bias; quick "
        "with --limit 200.",
        "vitlens compare vit-digits cnn-digits",
        "Explain and test",
        needs=("classes",),
    ),
    Command(
        "explain",
        "Attribution maps of a class: GradCAM and its variants, attention, gradients, occlusion, "
        "RISE, KernelSHAP.",
        "vitlens explain vit-digits --method gradcam,relevance",
        "Explain and test",
        needs=(),
    ),
    Command(
        "attack",
        "Robust accuracy over epsilon, of one or several models; what changes inside; with "
        "self-checks, resumable.",
        "vitlens attack vit-digits cnn-digits --limit 100",
        "Explain and test",
        needs=("classes",),
    ),
    Command(
        "features",
        "k-NN, linear probe, t-SNE, CKA, patch features and retrieval, layer by layer; zero-shot "
        "of image-text models.",
        "vitlens features vit-digits cnn-digits --limit 100 --no-cache",
        "Explain and test",
        needs=("features",),
    ),
    Command(
        "profile",
        "Parameters and FLOPs by part, memory, latency, throughput and growth with tokens; needs "
        "no weights.",
        "vitlens profile vit-micro resnet20",
        "Explain and test",
        needs=(),
        untrained=True,
    ),
    Command(
        "report",
        "Write report.md and the figures again from results.json and arrays/; --html: "
        "one self-contained file to share.",
        "vitlens rollout vit-digits --out mine && vitlens report mine --html",
        "Reports and lists",
        reports=False,
    ),
    Command(
        "demo",
        "A page on this machine: a picture, its attention by layer and head, maps, attacks, heads "
        "switched off.",
        "vitlens demo vit-digits cnn-digits",
        "Inspect",
        needs=("classes",),
        serves=True,
        html=True,
        package=provided("demo"),
    ),
    Command(
        "models",
        "The models that can be loaded, and which commands each supports.",
        "vitlens models deit3",
        "Reports and lists",
        reports=False,
    ),
    Command(
        "data",
        "The data sets and formats that --data takes; with a name, its parts, sizes and classes.",
        "vitlens data digits",
        "Reports and lists",
        reports=False,
    ),
    Command(
        "walkthrough",
        "One head step by step, from patches to the residual stream, each step with its numbers "
        "and checked.",
        "vitlens walkthrough vit-digits --layer 3 --head 1",
        "Inspect",
        needs=("walkthrough",),
        html=True,
    ),
    Command(
        "reversal",
        "One attention layer trained on the spot to reverse, copy or sort vectors, and where its "
        "heads attend; no model.",
        "vitlens reversal --heads 1",
        "Train and evaluate",
    ),
)
# mutable, so that a test may add a command
COMMANDS: Final[dict[str, Command]] = {command.word: command for command in _ENTRIES}
