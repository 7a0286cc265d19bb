"""Train or load a dictionary, measure it next to its baselines, and test its latents.

A dictionary belongs to a place in the model, "blocks.3.residual". With `--dictionary` and
`--latent`, only this latent is measured.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from vitlens.analysis.dictionary.autoencoder import SparseAutoencoder
from vitlens.analysis.dictionary.baselines import BASELINES, fit_baseline
from vitlens.analysis.dictionary.dictionary import DICTIONARY_FILE, Dictionary, load_sae
from vitlens.analysis.dictionary.latents import (
    LabelledImages,
    NamedLatents,
    label_latents,
    require_latent,
)
from vitlens.analysis.dictionary.measures import (
    Activity,
    Splicer,
    activity,
    matched_cosines,
    mean_score,
    monosemanticity,
)
from vitlens.analysis.dictionary.rows import ClassLatentRow, DictionaryRow
from vitlens.analysis.dictionary.tokens import TokenSet, patches_at, read_tokens
from vitlens.commands.run.load import ImageRequest
from vitlens.commands.run.run import Run
from vitlens.commands.run.targets import labels_of
from vitlens.commands.sae import record as rows
from vitlens.commands.sae.gallery import ENCODED, embeddings_of, gallery_of
from vitlens.commands.sae.images import Images, images_of
from vitlens.commands.sae.options import SaeOptions
from vitlens.commands.shared.label_rows import NoteRow
from vitlens.commands.shared.labelling import attributes_of
from vitlens.data.split import Split
from vitlens.errors import InputError, UnknownNameError
from vitlens.lens.trace import depth
from vitlens.models.loading import load
from vitlens.models.model import Model
from vitlens.pixels import Streamed
from vitlens.training.dictionary import DictionaryPlan, require_enough, train_dictionary
from vitlens.uncertainty import Estimate, share_of

IMAGES: Final = 300  # the largest number of held-out images without --limit
TRAININGS: Final = ("Training", "Training with another seed")  # titles of their progress
ALL_CLASSES: Final = 20  # classes of which latents are listed without --class
SHOWN: Final = 24  # latents in the gallery
RESIDUAL: Final = "residual"
_PARTS: Final = r"residual|attention|mlp|head\.\d{1,4}"


def measure(options: SaeOptions) -> Path | None:
    """Train a dictionary or load one, measure it, test its latents, and write the report.

    Returns the report's path, None in all processes but the first. Raises InputError for a layer, a
    latent or a class that is not there, for a dictionary of another model and for too few images,
    before anything is written.
    """
    run = Run("sae", options, most=1, images=ImageRequest(limit=IMAGES))
    model = run.model
    place = place_of(options, model)
    patches_at(model, place)  # raises for a place without patch tokens
    loaded = _load_dictionary(options, model, place)
    if loaded is not None:
        place = loaded.place
    images = images_of(run)
    plan = DictionaryPlan(
        k=options.k,
        kind=options.kind,
        expansion=options.expansion,
        prefixes=options.prefixes,
        tokens=options.tokens,
    )
    if loaded is not None:
        latent_count = len(loaded)
    else:
        require_enough(model, len(images.train), place, plan)
        width = patches_at(model, place).place.shape[-1]  # components of a token
        latent_count = plan.expansion * width
    if options.latent is not None:
        require_latent(options.latent, latent_count)
    encoder = None
    if options.encoder is not None:
        encoder = load(options.encoder, device=run.run_options.device)
    run = run.with_images([images.test])
    _require_classes(options, model)
    attributes = attributes_of(options.attributes, images.test)
    with run.folder("Sparse autoencoder of") as folder:
        measurement = _Measurement(run, place, images, plan, loaded, attributes, encoder)
        record = measurement.measure()
        if folder.folder is not None and loaded is None:
            measurement.dictionary.save(folder.folder.path / DICTIONARY_FILE)
        return folder.publish(lambda: record)


def place_of(options: SaeOptions, model: Model) -> str:
    """Return the place that --layer and --part name.

    Raises InputError for a layer or a part that is not there.
    """
    layers = depth(model)
    layer = options.layer
    if layer is None:
        layer = layers * 2 // 3
    if layer >= layers:
        raise InputError(f"expected --layer from 0 to {layers - 1} of {model.alias}, found {layer}")
    if re.fullmatch(_PARTS, options.part) is None:
        raise UnknownNameError(
            "value of --part", options.part, ("residual", "attention", "mlp", "head.0")
        )
    return f"blocks.{layer}.{options.part}"


def _load_dictionary(options: SaeOptions, model: Model, place: str) -> Dictionary | None:
    """Return the dictionary of --dictionary, None without it.

    place: the place of --layer and --part, which the dictionary must have if --layer is given.

    Raises InputError for a dictionary of another place.
    """
    if options.dictionary is None:
        return None
    expected = None if options.layer is None else place
    dictionary = load_sae(model, options.dictionary, place=expected)
    _, _, part = dictionary.place.split(".", 2)  # "blocks.3.head.1" has the part "head.1"
    if options.part not in (RESIDUAL, part):  # residual is the default
        raise InputError(
            f"expected a dictionary of --part {options.part} in {options.dictionary}, found one of "
            f"{dictionary.place}; leave --part out"
        )
    return dictionary


def _require_classes(options: SaeOptions, model: Model) -> None:
    for name in options.of_class:
        if name not in model.classes:
            raise UnknownNameError("class", name, model.classes)


@dataclass
class _Evaluated:
    """A dictionary or baseline with its activity on the held-out images.

    stability: the mean cosine of its directions and those of another training, None if there is
        none.
    """

    name: str
    autoencoder: SparseAutoencoder
    activity: Activity
    stability: float | None = None


class _Measurement:
    """The measurements of one run, in their order.

    dictionary: the dictionary, which `measure` trains or takes from `loaded`.
    notes: sentences for the report, which grow with the measurements.
    """

    dictionary: Dictionary

    def __init__(
        self,
        run: Run[SaeOptions],
        place: str,
        images: Images,
        plan: DictionaryPlan,
        loaded: Dictionary | None,
        attributes: dict[str, Tensor],
        encoder: Model | None,
    ) -> None:
        self.run = run
        self.options = run.options
        self.model = run.model
        self.place = place
        self.images = images
        self.plan = plan
        self.loaded = loaded
        self.attributes = attributes
        self.encoder = encoder
        self.groups = images.test.groups
        self.notes = [images.note] if images.note else []
        if images.shown is not None:
            self.notes.append(
                f"the gallery shows the {len(images.shown)} images of --show, not held-out ones"
            )
        self.labels = self._labels()
        # a single latent of a loaded dictionary is shown quickly: no training tokens, no baselines
        self.measures_baselines = self.options.latent is None or loaded is None

    def measure(self) -> rows.SaeRecord:
        """Return the record of the run."""
        held_out = self._tokens(self.images.test, "Tokens of held-out images")
        train = (
            None  # of a single latent of a loaded dictionary, which no baselines are compared with
        )
        if self.measures_baselines:
            train = self._tokens(self.images.train, "Tokens of training images")
        trained = self._dictionaries(train)
        self.dictionary = trained[0]
        evaluated = self._evaluate(trained, train, held_out)
        activity_of_dictionary = evaluated[0].activity
        embeddings = embeddings_of(self.images.test, self.encoder)
        scores = monosemanticity(activity_of_dictionary.mean, embeddings)
        named = self._name_latents(activity_of_dictionary, scores)
        gallery_rows, gallery_arrays = self._gallery(named, activity_of_dictionary)
        # `_dictionary_rows` appends to self.notes, so it is called before they are read
        dictionary_rows = tuple(self._dictionary_rows(evaluated, embeddings))
        notes = [*self.notes, *named.notes]
        gallery = {}
        if gallery_arrays is not None:
            gallery[self.model.alias] = gallery_arrays
        return rows.SaeRecord(
            setup=(self._setup(train, held_out),),
            dictionaries=dictionary_rows,
            latents=named.latents,
            classes=self._classes(named.classes),
            exemplars=gallery_rows,
            notes=tuple(NoteRow(note) for note in notes),
            gallery=gallery,
        )

    @property
    def chosen(self) -> tuple[int, ...]:
        """Return the latent of --latent, () without it."""
        return () if self.options.latent is None else (self.options.latent,)

    def _labels(self) -> Tensor | None:
        """Return the labels of the held-out images; without any, a note says what is left out."""
        if not self.model.has_classifier:
            reason = f"{self.model.alias} has no classifier"
        else:
            try:
                return labels_of(
                    self.model,
                    self.images.test,
                    predicted=self.options.predicted,
                    doing="test latents",
                    options=self.run.run_options,
                )
            except InputError as error:
                reason = str(error)
        self.notes.append(
            f"left out without labels: loss and accuracy recovered, the names of latents and their "
            f"tests ({reason})"
        )
        return None

    def _tokens(self, split: Split, what: str) -> TokenSet:
        """Return the patch tokens of images at the place.

        what: the title of the progress.
        """
        cache = self.run.run_options.data_dir / "features" if self.options.cache else None
        with self.run.processes.main_process_first(), self.run.progress(what, len(split)) as done:
            tokens = read_tokens(
                self.model, split, self.place, cache=cache, advance=done, **self.run.passes
            )
        self.notes += tokens.notes
        return tokens

    def _dictionaries(self, train: TokenSet | None) -> list[Dictionary]:
        """Return the dictionary, and with --seeds 2 a second training of it."""
        if self.loaded is not None:
            return [self.loaded]
        assert train is not None  # it is None only with a loaded dictionary
        trained = []
        for number in range(self.options.seeds):
            dictionary = train_dictionary(
                self.model,
                train,
                self.images.train,
                self.place,
                self.plan,
                seed=self.run.run_options.seed + number,
                precision=self.run.run_options.precision,
                progress=self.run.progress(TRAININGS[number], self.plan.tokens, "tokens"),
            )
            trained.append(dictionary)
        return trained

    def _evaluate(
        self, trained: Sequence[Dictionary], train: TokenSet | None, held_out: TokenSet
    ) -> list[_Evaluated]:
        """Return the dictionary, then its baselines, with their activity on held-out images.

        trained: the dictionary and, with --seeds 2, its second training.
        train: the training tokens, None for no baselines.
        """
        first = trained[0].autoencoder
        with self.run.progress("Latents of held-out images", len(held_out)) as done:
            dictionary = _Evaluated(first.sparsity.kind, first, activity(first, held_out, done))
        if len(trained) > 1:
            dictionary.stability = _stability(first, trained[1].autoencoder)
        if train is None:
            return [dictionary]
        baselines = []
        seed = self.run.run_options.seed
        for name in BASELINES:
            autoencoder = fit_baseline(name, train, train.kept, like=first, seed=seed)
            baseline = _Evaluated(name, autoencoder, activity(autoencoder, held_out))
            if name == "PCA":
                baseline.stability = _pca_stability(train, first)
            elif name == "k-means" and self.options.seeds > 1:
                second = fit_baseline(name, train, train.kept, like=first, seed=seed + 1)
                baseline.stability = _stability(autoencoder, second)
            baselines.append(baseline)
        return [dictionary, *baselines]

    def _dictionary_rows(
        self, evaluated: Sequence[_Evaluated], embeddings: Tensor
    ) -> list[DictionaryRow]:
        """Return the row of the dictionary and those of its baselines.

        A note says if the loss recovered cannot be measured.
        """
        splicer = None
        if self.labels is not None:
            splicer = Splicer.on(self.dictionary, self.images.test, self.labels, **self.run.passes)
        table = []
        for entry in evaluated:
            is_dead = entry.activity.frequency == 0
            of_splicing: dict[str, Any] = {}
            if splicer is not None:
                spliced = splicer.splice(entry.autoencoder)
                of_splicing["recovered_loss"] = spliced.recovered_loss(self.groups)
                of_splicing["recovered_accuracy"] = spliced.recovered_accuracy(self.groups)
                of_splicing["accuracy"] = share_of(spliced.correct, groups=self.groups)
            scores = monosemanticity(entry.activity.mean, embeddings)
            row = DictionaryRow(
                model=self.model.alias,
                dictionary=entry.name,
                latents=entry.autoencoder.count,
                l0=entry.activity.l0(self.groups),
                variance=entry.activity.explained_variance(self.groups),
                dead=Estimate(float(is_dead.double().mean()), n=len(is_dead)),
                stability=entry.stability,
                monosemanticity=mean_score(scores),
                **of_splicing,
            )
            table.append(row)
        if splicer is not None and table[0].recovered_loss is None:
            self.notes.append(
                f"mean ablation of the patch tokens at {self.place} does not change the loss "
                "significantly, so there is no scale for the loss recovered; try an earlier layer"
            )
        return table

    def _name_latents(self, activity_of_dictionary: Activity, scores: Tensor) -> NamedLatents:
        """Return the tested latents of the dictionary; none without labels.

        scores: the monosemanticity of each latent.
        """
        if self.labels is None:
            return NamedLatents((), ())
        options = self.options
        sample = LabelledImages(
            Streamed(self.images.test, self.model.pixel_dtype),
            self.labels,
            self.attributes,
            self.groups,
        )
        count = len(self.images.test)
        with (
            self.run.progress("Estimated effects", count) as estimating,
            self.run.progress("Removing and doubling latents", count) as done,
        ):
            return label_latents(
                self.dictionary,
                sample,
                activity_of_dictionary,
                tested=len(self.chosen) or options.tested,
                chosen=self.chosen,
                seed=self.run.run_options.seed,
                monosemanticity=scores,
                estimating=estimating,
                advance=done,
            )

    def _classes(self, class_rows: Sequence[ClassLatentRow]) -> tuple[ClassLatentRow, ...]:
        """Return the rows of the classes of --class, or of the first classes."""
        names = list(self.options.of_class)
        if not names:
            all_names = list(dict.fromkeys(row.name for row in class_rows))
            names = all_names[:ALL_CLASSES]
        return tuple(row for row in class_rows if row.name in names)

    def _gallery(
        self, named: NamedLatents, activity_of_dictionary: Activity
    ) -> tuple[tuple[rows.ExemplarRow, ...], rows.GalleryArrays | None]:
        """Return the images of the tested latents, or without labels of the most frequent ones."""
        latents = [row.latent for row in named.latents]
        if not latents:
            latents = list(self.chosen)
        if not latents:
            latents = activity_of_dictionary.frequency.argsort(descending=True).tolist()
        latents = latents[:SHOWN]
        split = self.images.test
        activity_on_images = activity_of_dictionary
        if self.images.shown is not None:
            split = self.images.shown
            tokens = read_tokens(self.model, split, self.place, **self.run.passes)
            activity_on_images = activity(self.dictionary.autoencoder, tokens)
        with self.run.progress("Evidence in the images", len(latents), "latents") as done:
            return gallery_of(self.dictionary, split, activity_on_images, latents, done)

    def _setup(self, train: TokenSet | None, held_out: TokenSet) -> rows.SetupRow:
        """Return the row of the dictionary's place, size and tokens."""
        autoencoder = self.dictionary.autoencoder
        tokens = held_out if train is None else train
        row = rows.SetupRow(
            model=self.model.alias,
            place=self.place,
            latents=autoencoder.count,
            dim=autoencoder.dim,
            k=autoencoder.sparsity.k,
            kind=autoencoder.sparsity.kind,
            trained=self.loaded is None,
            seen=self.dictionary.tokens,
            left_out=float(tokens.high.double().mean()),
            prefix=tokens.prefix,
            encoder=self.options.encoder or f"pixels ({ENCODED[0]} x {ENCODED[1]})",
        )
        if self.loaded is None and train is not None:
            row = replace(row, images=len(train), tokens=len(train.kept))
        return row


def _pca_stability(train: TokenSet, like: SparseAutoencoder) -> float:
    """Return the stability of PCA over two halves of the tokens, because PCA has no seed."""
    half = len(train.kept) // 2
    first_half = fit_baseline("PCA", train, train.kept[:half], like=like, seed=0)
    second_half = fit_baseline("PCA", train, train.kept[half : 2 * half], like=like, seed=0)
    return _stability(first_half, second_half)


def _stability(first: SparseAutoencoder, second: SparseAutoencoder) -> float:
    """Return the mean cosine of two dictionaries' directions, matched one to one."""
    return float(matched_cosines(first.decoder, second.decoder).mean())
