"""The features of models, layer by layer: extracted once, then classified, compared, mapped and drawn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import combinations, combinations_with_replacement
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlens.analysis.attention.methods import relevance
from vitlens.analysis.evaluation.classes import match_classes
from vitlens.analysis.evaluation.evaluate import accuracy, require_labels
from vitlens.analysis.features.cka import FEWEST
from vitlens.analysis.features.embedding import require_perplexity
from vitlens.analysis.features.features import EMBEDDING, Features, extract, resolve_pool
from vitlens.analysis.features.neighbours import NearestNeighbours, knn, nearest, same_class
from vitlens.analysis.features.probe import Probe, held_out, probe
from vitlens.analysis.features.similarity import distance_correlation, similarity
from vitlens.analysis.features.zero_shot import chosen_templates, prompted, template_scores
from vitlens.commands.features import record as kept
from vitlens.commands.features.drawn import draw, draw_patches, map_model, neighbour_rows
from vitlens.commands.features.images import FeatureSets, batch_of, load_sets, names_of
from vitlens.commands.features.options import FeaturesOptions
from vitlens.commands.run.progress import progress
from vitlens.commands.run.run import Run
from vitlens.commands.shared.comparison import compared
from vitlens.data.split import Split
from vitlens.errors import InputError, ModelError
from vitlens.lens.stages import embedding_stage, stages
from vitlens.models.language_image import PHOTO, by_template, has_text_tower, prompt_names, text_tower
from vitlens.models.model import Model
from vitlens.models.pretraining import pretraining_of, told_objectives
from vitlens.models.support import require
from vitlens.names import TEMPLATE_SETS, Objective, Weighting
from vitlens.processes import share_of
from vitlens.record import joined
from vitlens.uncertainty import Estimate, bootstrap_mean

_VOTES: Final[tuple[Weighting, ...]] = ("dino", "majority")  # by similarity, and one each
_OWN: Final = "own"  # a model's own classifier, among those of its last layer
_SHARED: Final = {"test", "bank"}  # read by all processes; of the others there may be fewer images than processes
_TEMPLATES: Final = next(each.default for each in fields(FeaturesOptions) if each.name == "templates")


def measure(options: FeaturesOptions) -> Path | None:
    """Run k-NN, probes, maps, similarity and retrieval for one model or several; returns the report's path.

    Images without labels, or without a training part, are mapped and compared but not classified. Of several processes
    each reads its share of the images; the first does the rest, the others return None. Raises InputError (or one of
    its kind) before anything is written.
    """
    run = Run("features", options, images=False)
    options = replace(options, run=run.run)
    with run.processes.main_process_first():
        sets = load_sets(run.models, options)
    run.splits = [own.test for own in sets]
    _require(run, sets, options)
    banks = [] if sets[0].bank is None else [sets[0].bank]
    with run.folder("Features of", others=banks) as folder:
        read = [_read(own, run) for own in sets]
        return folder.publish(lambda: _record(sets, [each for each in read if each], options))  # the first has all


def _require(run: Run[Any], sets: Sequence[FeatureSets], options: FeaturesOptions) -> None:
    """Refuse what cannot be done before a folder is made."""
    for own in sets:
        stages(own.model)
        resolve_pool(own.model, options.pool)
        for name in own.parts.keys() & _SHARED:
            share_of(own.parts[name], run.processes)
        if own.bank is not None and max(options.ks) > len(own.bank):
            raise InputError(
                f"expected --k of at most the {len(own.bank)} training images, found {max(options.ks)}; give fewer, or "
                "a greater --bank"
            )
    bank = sets[0].bank
    if bank is not None and options.probe:
        held_out(require_labels(bank).cpu(), groups=bank.groups, seed=0)  # refuses what cannot be probed
    if options.tsne:
        require_perplexity(options.perplexity, len(sets[0].test))
    told_objectives(options.objective, run.aliases)
    with_texts = [model for model in run.models if has_text_tower(model)]
    if (options.prompts or options.templates != _TEMPLATES) and not with_texts:
        text_tower(run.model)  # says which models have one
    for model in with_texts:
        if options.prompts:
            text_tower(model).tokens(list(options.prompts))
            require(model, "chain")
        if options.templates != _TEMPLATES:
            text_tower(model).tokens([template.replace("{}", "thing") for template in _templates(options)])


def _read(own: FeatureSets, run: Run[Any]) -> dict[str, Features]:
    """Return the features of one model's images, by what they are for; nothing in all processes but the first."""
    model = own.model
    options = own.options
    whole: dict[str, Any] = {
        "embedding": embedding_stage(model) is not None,
        "processes": run.processes,
        "cache": run.run.data_dir / "features" if options.cache else None,
    }
    with progress(f"Reading {own.alias}", sum(map(len, own.parts.values())), quiet=run.run.quiet) as advance:
        found = {
            name: extract(
                model,
                split,
                pool=options.pool,
                norm=options.norm,
                batch_size=run.run.batch_size,
                precision=run.run.precision,
                advance=advance,
                **(whole if name in _SHARED else {}),
            )
            for name, split in own.parts.items()
        }
    return {} if found["test"] is None else {name: each for name, each in found.items() if each is not None}


def _record(
    sets: Sequence[FeatureSets], read: Sequence[Mapping[str, Features]], options: FeaturesOptions
) -> kept.FeaturesRecord:
    """Return the record of all models; read: the features of each."""
    own = sets[0]
    told = told_objectives(options.objective, [each.alias for each in sets])
    classified = {one.alias: _classified(one, each) for one, each in zip(sets, read)}
    parts = [_of_model(*each, classified[each[0].alias], told.get(each[0].alias)) for each in zip(sets, read)]
    layers = list(_similar([each["test"] for each in read], own.test.groups, seed=own.seed))
    bank = None if own.bank is None else len(own.bank)
    correct = {
        alias: {name: right.numpy() for name, right in each.correct.items()} for alias, each in classified.items()
    }
    return replace(
        joined(parts),
        sets=(kept.SetsRow(len(own.test), own.chance, own.test.masks is not None, bank, own.no_bank),),
        pairs=tuple(_pairs(correct, own)),
        head=tuple(_heads(correct, own)),
        within=tuple(row for row in layers if not isinstance(row, kept.BetweenRow)),
        between=tuple(row for row in layers if isinstance(row, kept.BetweenRow)),
    )


@dataclass(frozen=True)
class _Classified:
    """One model's images, classified. correct: which are, (n,) each: by the model itself ("own", where it has the
    data's classes) and by its last layer's "knn-20" or "probe"; precision: of the last layer, by number of neighbours;
    depth, notes: of the record."""

    correct: Mapping[str, Tensor]
    precision: Mapping[str, Estimate] = field(default_factory=dict)
    depth: Sequence[kept.DepthRow] = ()
    notes: Sequence[str] = ()


def _of_model(
    own: FeatureSets, read: Mapping[str, Features], found: _Classified, told: Objective | None
) -> kept.FeaturesRecord:
    """Return the tables and arrays of one model alone."""
    alias = own.alias
    test = read["test"]
    model = own.model
    samples = draw_patches(own)
    itself = found.correct.get(_OWN)
    voters = [name for name in found.correct if name.startswith("knn")]
    by = _OWN if itself is not None else voters[-1] if voters else ""  # whose errors the maps mark
    maps, space = map_model(own, test, ~found.correct[by] if by else None, samples)
    arrays, searched, matches = draw(own, read)
    templates, reason = _zero_shot(own, test)
    prompts, relevances = _prompted(own)
    first = test.layers[0]
    last = test.layers[-1]
    # of several layers the last stays
    reached = {(row.weighting, row.classifier.partition("-")[2]): row.accuracy for row in found.depth}
    by_votes = [{k: each for (kind, k), each in reached.items() if kind == votes} for votes in _VOTES]
    row = kept.FeaturesRow(
        alias,
        **vars(pretraining_of(model, told=told)),
        parameters=model.parameter_count(),
        pool=test.pool,
        kind="stage" if last.kind == "stage" else "block",
        layers=len(test.layers) - test.embedded,
        dim=last.dim,
        norm=last.norm,
        embedding=None if not test.embedded else "stem" if first.kind == "stem" else "embedding",
        accuracy=None if itself is None else accuracy(itself, groups=own.test.groups),
        probe=reached.get((None, "")),
        knn=by_votes[0],
        majority=by_votes[1],
        precision=found.precision,
        zero_shot=templates[0].accuracy if templates else None,
        no_zero_shot=reason,
        candidates=len(own.test.classes) if templates else None,
        chance=1 / len(own.test.classes) if templates else None,
        errors=f"by {alias} itself" if by == _OWN else f"by {by.partition('-')[2]}-NN" if by else "",
        **searched,
    )
    notes = [note for name in ("test", "bank") if name in read for note in read[name].notes]
    return kept.FeaturesRecord(
        features=(row,),
        depth=tuple(found.depth),
        maps=tuple(maps),
        patches=tuple(neighbour_rows(own, samples)),
        matches=tuple(matches),
        templates=tuple(templates),
        prompts=tuple(prompts),
        notes=tuple(map(kept.NoteRow, dict.fromkeys((*notes, *found.notes)))),
        spaces={alias: space},
        shown={alias: replace(arrays, prompts=relevances)},
    )


def _classified(own: FeatureSets, read: Mapping[str, Features]) -> _Classified:
    split = own.test
    test = read["test"]
    alias = own.alias
    options = own.options
    seed = own.seed
    itself = _own_answers(own.model, split, test)
    correct = {} if itself is None else {_OWN: itself}
    if own.bank is None:
        return _Classified(correct)
    labels = require_labels(split).cpu().long()
    known = require_labels(own.bank).cpu().long()
    rows = []
    notes = [*_rare_classes(labels, known, len(split.classes))]

    by_votes = partial(knn, groups=split.groups)

    def row(
        place: int,
        name: str,
        result: NearestNeighbours | Probe,
        *,
        votes: Weighting | None = None,
        c: float | None = None,
    ) -> None:
        layer = test.layers[place]
        depth = (place + 1 - test.embedded) / (len(test.layers) - test.embedded)
        rows.append(kept.DepthRow(alias, layer.title, depth, name, result.accuracy, own.chance, layer.index, votes, c))
        if votes != "majority":
            correct[name] = result.correct  # at the end those of the last layer

    with progress(f"Classifying by {alias}", len(test.layers), unit="layers", quiet=options.run.quiet) as advance:
        for place, (queries, bank) in enumerate(zip(test.values, read["bank"].values)):
            near = nearest(queries, bank, k=max(options.ks))
            for k in options.ks:
                for votes in _VOTES:
                    voted = by_votes(bank, known, queries, labels, k=k, weighting=votes, neighbours=near)
                    row(place, f"knn-{k}", voted, votes=votes)
            if options.probe:
                grouped = partial(probe, train_groups=own.bank.groups, groups=split.groups, seed=seed)
                probed = grouped(bank, known, queries, labels)
                notes += probed.notes
                row(place, kept.PROBE, probed, c=probed.c)
            advance(1)
    same = {str(k): same_class(near, known, labels, k=k).double().numpy() for k in options.ks}
    precision = {
        k: bootstrap_mean(share, groups=own.groups, seed=seed, least=0.0, most=1.0) for k, share in same.items()
    }
    return _Classified(correct, precision, rows, [f"{alias}: {note}" for note in dict.fromkeys(notes)])


def _own_answers(model: Model, split: Split, test: Features) -> Tensor | None:
    """Return whether the model's own predictions are correct; None without a classifier of the data's classes."""
    if split.labels is None or not model.has_classifier:
        return None
    try:
        columns, _ = match_classes(model.classes, split.classes)
    except InputError:
        return None
    return test.logits[:, columns].argmax(-1) == split.labels.cpu().long()


def _rare_classes(labels: Tensor, known: Tensor, classes: int) -> Iterator[str]:
    """Yield how many classes of the test images have no training image, or one."""
    counts = torch.bincount(known, minlength=classes)
    tested = labels.unique()
    for number, description in (
        (0, "no training image, so none of their images can be correct"),
        (1, "one training image"),
    ):
        rare = int((counts[tested] == number).sum())
        if rare:
            yield f"{rare} of the {len(tested)} classes of the test images have {description}"


def _pairs(correct: Mapping[str, Mapping[str, NDArray[np.bool_]]], own: FeatureSets) -> Iterator[kept.PairRow]:
    """Models pairwise on the same images, for every classifier of the last layer, corrected together."""
    named = [(*pair, name) for pair in combinations(correct, 2) for name in correct[pair[0]] if name != _OWN]
    tests = [(one, two, correct[one][name], correct[two][name]) for one, two, name in named]
    for (*_, name), row in zip(named, compared(tests, groups=own.groups, seed=own.seed)):
        k = int(name.partition("-")[2] or 0)
        differences = (None, row.difference) if k else (row.difference, None)
        yield kept.PairRow(row.first, row.second, name, k, row.p, row.p_holm, row.better, *differences)


def _heads(correct: Mapping[str, Mapping[str, NDArray[np.bool_]]], own: FeatureSets) -> Iterator[kept.HeadRow]:
    """Yield the classifiers on each model's last layer beside its own classifier, corrected together."""
    tests = [
        (alias, name, right, each[_OWN])
        for alias, each in correct.items()
        if _OWN in each
        for name, right in each.items()
        if name != _OWN
    ]
    for row in compared(tests, groups=own.groups, seed=own.seed):
        assert row.difference is not None  # of rows just made
        yield kept.HeadRow(row.first, row.second, row.difference, row.p, row.p_holm)


def _similar(tests: Sequence[Features], sources: Tensor | None, *, seed: int) -> Iterator[kept.LayersRow]:
    """Yield every pair of layers, of one model and of two; none for so few images that CKA is not defined."""
    for first, second in combinations_with_replacement(tests, 2) if len(tests[0]) >= FEWEST else ():
        other = None if first is second else second
        found = similarity(first, other, sources=sources, seed=seed)
        ranks = distance_correlation(first, other, seed=seed).values
        for (row, column), value in np.ndenumerate(found.values.numpy()):
            low, high = (None if end is None else float(end[row, column]) for end in (found.low, found.high))
            layer, to = (
                str(EMBEDDING if each.index is None else each.index)
                for each in (first.layers[row], second.layers[column])
            )
            cka = Estimate(float(value), low, high, found.n, "") if np.isfinite(value) else None
            rank = float(ranks[row, column])
            kind = kept.LayersRow if other is None else kept.BetweenRow
            yield kind(first.alias, second.alias, layer, to, cka, rank if np.isfinite(rank) else None)


def _templates(options: FeaturesOptions) -> tuple[str, ...]:
    """Return the templates of the options: of named sets, of files with one per line, and as typed."""
    words: list[str] = []
    for name in options.templates:
        file = Path(name)
        is_file = name not in TEMPLATE_SETS and "{}" not in name and file.is_file()
        words += [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()] if is_file else [name]
    sets: Mapping[str, Sequence[str]] = dict.fromkeys(TEMPLATE_SETS, ())
    if set(words) & set(TEMPLATE_SETS) - {"photo"}:
        from vitlens.models.sources.open_clip import template_sets

        sets = template_sets()
    return chosen_templates(words, {**sets, "photo": PHOTO})


def _zero_shot(own: FeatureSets, test: Features) -> tuple[list[kept.TemplateRow], str]:
    """Zero-shot accuracy of the ensemble and of every template, or why there is none ("" for no text tower)."""
    split = own.test
    model = own.model
    if not has_text_tower(model) or split.labels is None or not split.classes:
        return [], ""
    try:
        templates = _templates(own.options)
        names = prompt_names(split.classes)
        embeddings = []
        what = f"Reading prompts by {own.alias}"
        quiet = own.options.run.quiet
        with progress(what, len(templates), unit="templates", quiet=quiet) as advance:
            for template in templates:
                embeddings.append(by_template(text_tower(model), names, [template], device=model.device).cpu())
                advance(1)
    except ModelError as error:  # no tokenizer; with --prompt it was refused before
        return [], str(error)
    joint = torch.cat(embeddings)
    scores = template_scores(test.logits, split.labels, joint, templates, groups=split.groups, seed=own.seed)
    return [kept.TemplateRow(own.alias, *each) for each in scores], ""


def _prompted(own: FeatureSets) -> tuple[list[kept.PromptRow], NDArray[np.floating] | None]:
    """Return the similarity of the images that are drawn to each prompt, and its relevance over them."""
    model = own.model
    prompts = own.options.prompts
    chosen = own.chosen
    if not prompts or not has_text_tower(model):
        return [], None
    images = batch_of(own.drawn, chosen, model)
    classifier = prompted(model, prompts)
    tower = text_tower(model)
    maps = []
    for index in range(len(prompts)):
        targets = torch.full((len(chosen),), index, device=model.device)
        maps.append(relevance(classifier, images, targets=targets).float().cpu())
    with torch.no_grad():
        logits = classifier(images).float().cpu()
    cosine = (logits - tower.bias) / tower.scale
    rows = [
        kept.PromptRow(own.alias, image, name, prompt, float(cosine[image, number]))
        for image, name in enumerate(names_of(own.drawn, chosen))
        for number, prompt in enumerate(prompts)
    ]
    return rows, torch.stack(maps, 1).numpy()
