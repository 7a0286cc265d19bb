"""What features learned with and without labels tell: probes, neighbours, few images, words, objects, corruptions."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.attention.weights import attention_maps
from vitlens.analysis.failures.disturbances import CORRUPTIONS
from vitlens.analysis.failures.operations import OPERATIONS
from vitlens.analysis.features.cka import CKAStream
from vitlens.analysis.features.embedding import embed
from vitlens.analysis.features.features import extract, features
from vitlens.analysis.features.neighbours import few_shot, nearest, vote
from vitlens.analysis.features.objectness import FEWEST_MASKS, objectness
from vitlens.analysis.features.probe import probe
from vitlens.commands.study import record as rows
from vitlens.commands.study.kinds.kinds import Point
from vitlens.commands.study.kinds.setup import Setup
from vitlens.data.captions import PROMPTS, WORDINGS
from vitlens.data.draws import keys
from vitlens.data.split import Split
from vitlens.models.model import Model
from vitlens.names import PERPLEXITY, FeaturePool
from vitlens.training.objectives.clip import text_classifier
from vitlens.uncertainty import Estimate, holm, student_mean, student_test, welch

POOL: Final[FeaturePool] = "cls+mean"  # one rule for all points, whichever tokens their objective trains
NEIGHBOURS: Final = (1, 5, 20)
SHOTS: Final = (1, 2, 5, 10)
DRAWS: Final = 10  # of the images of few shots
CORRUPTED: Final = ("noise", "blur", "contrast", "occlusion")
SEVERITY: Final = 3
PROBE: Final = "linear probe"
_EMBEDDED: Final = 400  # test images of t-SNE
_CONSTANT: Final = 1e-6  # standard deviation of features that are all the same: a collapse
_AT_ONCE: Final = 100  # images whose attention is read

Values = Mapping[str, Sequence[float]]  # of each point by its label, one a seed


def probed(setup: Setup, model: Model, *, seed: int) -> NDArray[np.bool_]:
    """Return whether a linear probe on frozen features classifies each test image correctly, (n,)."""
    bank = _features(model, setup.train)
    read = _features(model, setup.test)
    correct = _probe_correct(setup, bank, read, _labels(setup.test), seed=seed)
    found: NDArray[np.bool_] = correct.numpy()
    return found


def _probe_correct(setup: Setup, bank: Tensor, read: Tensor, truth: Tensor, *, seed: int) -> Tensor:
    """Return which of these features a probe fitted to the training images classifies correctly, (n,).

    Images of one group, such as scenes of one digit, stay together where the regularisation is chosen.
    """
    groups = setup.train.groups
    return probe(bank, _labels(setup.train), read, truth, train_groups=groups, seed=seed).correct


def pretrained(setup: Setup) -> dict[str, Any]:
    """Return what the features of all points and seeds tell, as fields of the record."""
    scores, losses = (defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list)) for _ in range(2))
    shots = defaultdict[str, list[Tensor]](list)
    overlaps = dict[str, list[Tensor]]()
    wordings = dict[str, Tensor]()
    tested: dict[tuple[str, int], Tensor] = {}
    fewest = int(torch.bincount(_labels(setup.train)).min())
    counts = [count for count in SHOTS if count <= fewest]
    for point, seed in product(setup.points, setup.seeds):
        model = setup.trained(point.label, seed=seed)
        label = point.label
        bank = _features(model, setup.train)
        read = _features(model, setup.test)
        tested[label, seed] = read
        for measure, score in _classified(setup, bank, read):
            scores[measure][label].append(score)
        for measure, score in _robust(setup, model, bank, read, seed=seed):
            (scores if measure == PROBE else losses)[measure][label].append(score)
        draws = few_shot(
            bank, _labels(setup.train), read, _labels(setup.test), shots=counts, draws=DRAWS, seed=setup.run.seed
        )  # the same images for all points and seeds
        shots[label].append(draws)
        if setup.test.masks is not None and len(setup.test) >= FEWEST_MASKS:
            overlaps.setdefault(label, []).append(_overlaps(model, setup.test, seed=setup.run.seed))
        if point.objective == "clip":
            own = wordings.get(label, torch.zeros(0, len(PROMPTS), dtype=torch.float64))
            wordings[label] = torch.cat((own, _by_wording(setup, model, label, seed)[None]))
    words = {point.label: point.words for point in setup.points}
    chance = 1 / len(setup.test.classes)
    return {
        "feature_scores": tuple(score_rows(scores, words, chance)),
        "corrupted": tuple(score_rows(losses, words, None)),
        "few_shot": tuple(
            rows.FewShotRow(
                label,
                words[label],
                count,
                _mean([float(each[at].mean()) for each in own]),
                float(np.mean([float(each[at].std()) for each in own])),
                DRAWS,
                chance,
            )
            for label, own in shots.items()
            for at, count in enumerate(counts)
        ),
        "zero_shot": tuple(
            rows.ZeroShotRow(
                label, words[label], len(PROMPTS), _mean(own.mean(1)), _mean(own.amin(1)), _mean(own.amax(1)), chance
            )
            for label, own in wordings.items()
        ),
        "wordings": tuple(
            rows.WordingRow(label, words[label], wording, wording in WORDINGS, _mean(own[:, at]), chance)
            for label, own in wordings.items()
            for at, wording in enumerate(PROMPTS)
        ),
        "likeness": tuple(likeness_rows(tested, words)),
        "objectness": tuple(objectness_rows(overlaps, words, images=len(setup.test))),
        "space": _space(setup, setup.points, tested),
    }


def _labels(split: Split) -> Tensor:
    assert split.labels is not None  # see setup.prepare
    return split.labels.cpu().long()


def _features(model: Model, split: Split) -> Tensor:
    read = extract(model, split, layer=-1, pool=POOL)
    assert read is not None
    return read.at(-1)


def _mean(values: Any) -> Estimate:
    return student_mean(np.asarray(values), least=0.0, most=1.0)


def _classified(setup: Setup, bank: Tensor, read: Tensor) -> Iterator[tuple[str, float]]:
    """Yield the accuracy of k-NN among the training images."""
    labels = _labels(setup.train)
    truth = _labels(setup.test)
    known = [k for k in NEIGHBOURS if k <= len(bank)]
    near = nearest(read, bank, k=max(known))
    for k in known:
        said = vote(near, labels, k=k, classes=len(setup.train.classes))
        yield f"k-NN, k = {k}", float((said == truth).double().mean())


def _robust(setup: Setup, model: Model, bank: Tensor, read: Tensor, *, seed: int) -> Iterator[tuple[str, float]]:
    """Yield the accuracy of a linear probe, and what of it is lost where test images are corrupted, by kind; the probe
    is fitted once, to clean images."""
    truth = _labels(setup.test)
    sets = [read]
    numbers = keys(setup.run.seed, torch.arange(len(setup.test)))  # the same pixels for all points and seeds
    for name in CORRUPTED:
        kind = CORRUPTIONS[name]
        parts = []
        level = kind.levels[SEVERITY - 1]
        for batch in setup.test.batches(_AT_ONCE, device=setup.device):
            changed = OPERATIONS[kind.operation](batch.images, level, numbers[batch.indices.cpu()]).clamp(0, 1)
            parts.append(features(model, changed, layer=-1, pool=POOL).at(-1))
        sets.append(torch.cat(parts))
    correct = _probe_correct(setup, bank, torch.cat(sets), truth.repeat(len(sets)), seed=seed)
    clean, *others = correct.double().view(len(sets), -1).mean(1).tolist()
    yield PROBE, clean
    yield from ((CORRUPTIONS[name].title, clean - other) for name, other in zip(CORRUPTED, others))


def _overlaps(model: Model, split: Split, *, seed: int) -> Tensor:
    """Return the mean intersection over union of the best head, of maps of other images and of the mean mask, (3,)."""
    assert split.masks is not None
    maps = torch.cat(
        [
            attention_maps(model, batch.images)[-1].maps.float().cpu()
            for batch in split.batches(_AT_ONCE, device=model.device)
        ]
    )
    found = objectness(maps, split.masks.cpu(), seed=seed)
    return torch.stack((found.iou.mean(), found.shuffled.mean(), found.mean_mask.mean()))


def _by_wording(setup: Setup, model: Model, label: str, seed: int) -> Tensor:
    """Return the zero-shot accuracy with each wording, (wordings,)."""
    read = extract(model, setup.test, layer=-1)  # what the classifier reads
    assert read is not None
    texts = text_classifier(setup.place(label, seed), setup.test.classes).cpu()
    said = torch.einsum("nd,wcd->wnc", F.normalize(read.at(-1), dim=-1), texts).argmax(-1)
    return (said == _labels(setup.test)).double().mean(1)


def score_rows(
    scores: Mapping[str, Values], words: Mapping[str, str], chance: float | None
) -> Iterator[rows.FeatureScoreRow]:
    """Yield each measure of each point over seeds, against random weights and the supervised point; p-values are
    corrected for the comparisons of their measure."""
    for measure, own in scores.items():
        pairs = [
            (label, against)
            for against in ("random", "supervised")
            for label in own
            if label not in ("random", against)
        ]
        gains = [
            welch(100 * np.array(own[label]), 100 * np.array(own[other]), unit="points", most=100.0)
            for label, other in pairs
        ]
        corrected = holm([p for _, p in gains])
        found = {pair: (gain, p) for pair, (gain, _), p in zip(pairs, gains, corrected)}
        for label, values in own.items():
            value = student_mean(values, least=-1.0 if chance is None else 0.0, most=1.0)
            over_random, over_supervised = (found.get((label, each), (None, None)) for each in ("random", "supervised"))
            yield rows.FeatureScoreRow(label, words[label], measure, value, chance, *over_random, *over_supervised)


def objectness_rows(
    overlaps: Mapping[str, Sequence[Tensor]], words: Mapping[str, str], *, images: int
) -> Iterator[rows.ObjectnessRow]:
    """Yield each point's overlap over seeds, against both baselines, paired by seed, and against random weights;
    p-values are corrected for the comparisons with baselines and, apart, with random weights. overlaps: by label (3,) a
    seed."""
    tables = {label: torch.stack(tuple(own)).numpy() for label, own in overlaps.items()}
    gains = {label: own[:, :1] - own[:, 1:] for label, own in tables.items()}
    ps = iter(holm([student_test(own[:, at]) for own in gains.values() for at in (0, 1)]))
    trained = [label for label in tables if label != "random"]
    over = [welch(tables[label][:, 0], tables["random"][:, 0], unit="IoU", most=1.0) for label in trained]
    beside = {label: (gain, p) for label, (gain, _), p in zip(trained, over, holm([p for _, p in over]))}
    for label, own in tables.items():
        means = [student_mean(values, unit="IoU", least=0.0, most=1.0) for values in own.T]
        of_maps, of_mean = (student_mean(values, unit="IoU", least=-1.0, most=1.0) for values in gains[label].T)
        yield rows.ObjectnessRow(
            label,
            words[label],
            images,
            means[0],
            means[1],
            means[2],
            of_maps,
            next(ps),
            of_mean,
            next(ps),
            *beside.get(label, ()),
        )


def likeness_rows(tested: Mapping[tuple[str, int], Tensor], words: Mapping[str, str]) -> Iterator[rows.LikenessRow]:
    """CKA of every pair of points with one seed; of a point with itself, of its trainings with different seeds."""
    names = [*tested]
    stream = CKAStream()
    stream.add([*tested.values()])
    cka = stream.cka().numpy()
    for one, other in product(words, words):
        pairs = [
            float(cka[at, to])
            for at, (label, seed) in enumerate(names)
            for to, (against, also) in enumerate(names)
            if (label, against) == (one, other) and (seed < also if one == other else seed == also)
        ]
        if not np.isfinite(pairs).all():  # fewer than 4 images, or features that are all the same
            continue
        value = (
            Estimate(float(np.mean(pairs or [1.0])), unit="")
            if one == other
            else student_mean(pairs, unit="", least=-1.0, most=1.0)
        )
        yield rows.LikenessRow(one, words[one], other, words[other], value)


def _space(setup: Setup, points: Sequence[Point], tested: Mapping[tuple[str, int], Tensor]) -> rows.SpaceArrays | None:
    """Return the t-SNE of every point's features of the same test images, of the first seed."""
    chosen = setup.test.limit(min(_EMBEDDED, len(setup.test)), seed=setup.run.seed).subset.indices
    perplexity = min(PERPLEXITY, (len(chosen) - 1) / 3)
    if perplexity < 1:
        return None
    places = {int(index): at for at, index in enumerate(setup.test.subset.indices)}
    own = torch.tensor([places[int(index)] for index in chosen])
    return rows.SpaceArrays(
        {
            at: embed(tested[point.label, setup.seeds[0]][own], perplexity=perplexity).points.numpy()
            for at, point in enumerate(points)
            if float(tested[point.label, setup.seeds[0]][own].std(0).max()) > _CONSTANT
        },
        _labels(setup.test)[own].numpy(),
        np.array(setup.test.classes),
    )
