"""What the league of explanation methods says, from a run's folder alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vitlens.analysis.faithfulness.league import BASELINES
from vitlens.files import RunRecord
from vitlens.runs.explain_verify_draw import SUBSTRATE_WORDS, League, leagues
from vitlens.runs.explain_verify_more import SEARCH
from vitlens.runs.sections import Section, Table, number
from vitlens.uncertainty import Estimate, Side, apart


def tell_league(record: RunRecord) -> list[Section]:
    """For every model the league table, localisation, randomisation, agreement and counterfactuals; then the limits."""
    sections = [section for league in leagues(record) for section in _tell(record, league)]
    searched = any(record.has_arrays(f"counterfactuals-{league.alias}") for league in leagues(record))
    return [*sections, Section("Limits", LEAGUE_LIMITS if searched else LEAGUE_LIMITS[:-1])]


def _tell(record: RunRecord, league: League) -> Iterator[Section]:
    found, rows, names, suffix = league.found, league.rows, league.names, league.suffix
    of = f" ({league.alias})" if suffix else ""
    lines = tuple(_summary(rows, found, league.settings))
    figures = (f"league{suffix}", f"faithfulness{suffix}")
    yield Section(f"Which map can be trusted{of}", lines, (Table("League", _league(rows, found)),), figures)
    if any(name.startswith("localisation/") for name in found):
        yield Section(f"On the object{of}", tuple(_masked_words(found)), (_localisation(names, found),))
    yield Section(f"When the weights are randomised{of}", tuple(_stage_words(league.settings)), tuple(_stages(rows)))
    if league.pairs:
        words = tuple(_agreement_words(league.pairs))
        yield Section(f"Agreement between methods{of}", words, (_agreement(league.pairs),))
    if record.has_arrays(f"counterfactuals-{league.alias}"):
        drawn = (f"counterfactuals{suffix}",)
        yield Section(f"Counterfactuals{of}", (_size_words(found),), (_sizes(names, found),), drawn)


LEAGUE_LIMITS = (
    "Removing patches makes images that the model was never trained on: a low deletion curve can also mean that a hole "
    "here confuses it. Insertion, ROAD and another substrate ask the same in other ways; trust what they agree on.",
    "A map that lies on the object is what a person expects, not proof that the model looks there; a model may rightly "
    "use the background, and then a faithful map leaves the mask.",
    "That maps change with the weights is necessary, not sufficient. The randomisation shuffles each weight tensor's "
    "numbers among themselves, from the head down; batch norm's running statistics stay.",
    "Neither search for a counterfactual proves that no smaller set of patches exists; where nothing turned the "
    "prediction, all patches are counted.",
)


def _league(rows: Sequence[Mapping[str, object]], found: Mapping[str, Estimate]) -> list[dict[str, Any]]:
    """The table: what each method reached in the checks that matter most, what it costs, and the verdict."""
    titles = {
        "faithfulness/gap": "insertion − deletion",
        "faithfulness/deletion": "deletion",
        "faithfulness/insertion": "insertion",
        "faithfulness/road": "ROAD",
        "localisation/roc_auc": "ROC-AUC",
        "localisation/pointing": "pointing",
        "randomisation": "weights randomised",
    }
    lines = []
    for row in rows:
        name = str(row["method"])
        line: dict[str, Any] = {"method": name}
        for metric, title in titles.items():
            if any(key.startswith(f"{metric}/") for key in found):
                one = found.get(f"{metric}/{name}")
                line[title] = None if one is None else _short(one)
        forwards = found.get(f"cost/forwards/{name}")
        line["forwards"] = "–" if forwards is None else number(forwards.value)
        line["ms an image"] = number(1000 * float(str(row["seconds"])))
        line["verdict"] = row["verdict"]
        lines.append(line)
    return lines


def _short(one: Estimate) -> str:
    """A number with its interval in three decimals, for a table of many columns."""
    if one.low is None or one.high is None:
        return f"{one.value:.3f}"
    return f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})"


def _summary(
    rows: Sequence[Mapping[str, object]], found: Mapping[str, Estimate], settings: Mapping[str, Any]
) -> Iterator[str]:
    own = [row for row in rows if not row["baseline"]]
    flagged = [str(row["method"]) for row in own if row["flagged"]]
    apart = [str(row["method"]) for row in own if all(_above(found, str(row["method"]), base) for base in BASELINES)]
    yield (
        f"{len(own)} methods on {int(settings['images']):,} images; patches that are removed show "
        f"{SUBSTRATE_WORDS[str(settings['substrate'])]}. Areas and probabilities are fractions; insertion − deletion "
        "is the difference of the two areas, 0 for an order at random. A verdict counts a baseline as beaten where the "
        "paired 95 % interval of the difference, over the same images, excludes 0."
    )
    yield (f"More faithful than random and centre, the 95 % intervals of insertion − deletion apart: {_listed(apart)}.")
    if any(name.startswith("localisation/roc_auc/") for name in found):
        metric = "localisation/roc_auc"
        on_object = [
            str(row["method"]) for row in own if all(_above(found, str(row["method"]), b, metric) for b in BASELINES)
        ]
        yield f"On the object more than random and centre, the intervals of ROC-AUC apart: {_listed(on_object)}."
    yield (
        f"Flagged, as their maps hardly change when the weights are randomised (mean Spearman 0.5 or more): "
        f"{_listed(flagged)}."
    )
    for row in own:
        if row["faults"]:
            yield f"**{row['method']}: {row['faults']}**; such maps say nothing."


def _above(found: Mapping[str, Estimate], name: str, base: str, metric: str = "faithfulness/gap") -> bool:
    one, other = found.get(f"{metric}/{name}"), found.get(f"{metric}/{base}")
    return one is not None and other is not None and apart(one, other) is Side.ABOVE


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def _masked_words(found: Mapping[str, Estimate]) -> Iterator[str]:
    n = next((one.n for name, one in found.items() if name.startswith("localisation/roc_auc/")), None)
    yield (
        f"Maps brought bilinearly to the masks of {n:,} images. Average precision and mass inside are the mask's area "
        "by chance; IoU and pixel accuracy take what lies above the map's mean; in the pointing game ties count only "
        "when all of them lie on the object."
    )


def _localisation(names: Sequence[str], found: Mapping[str, Estimate]) -> Table:
    titles = {
        "roc_auc": "ROC-AUC",
        "pointing": "pointing",
        "average_precision": "average precision",
        "iou": "IoU",
        "pixel_accuracy": "pixel accuracy",
        "mass": "mass inside",
    }
    rows = [
        {"method": name} | {title: _short(found[f"localisation/{key}/{name}"]) for key, title in titles.items()}
        for name in names
    ]
    return Table("Localisation, fractions", rows)


def _stage_words(settings: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Mean Spearman correlation of {settings['randomised']} images' maps before and after, weights randomised from "
        "the head down, each column with all before it. A map of what the model has learnt falls towards 0."
    )


def _stages(rows: Sequence[Mapping[str, object]]) -> Iterator[Table]:
    lines: list[dict[str, Any]] = []
    for row in rows:
        stages = row.get("by_stage")
        if isinstance(stages, Mapping):
            values = {name: "–" if value is None else f"{value:.2f}" for name, value in stages.items()}
            lines.append({"method": row["method"], **values, "flagged": "yes" if row["flagged"] else ""})
    if lines:
        yield Table("Correlation with the model's own map", lines)


def _agreement_words(pairs: Sequence[Mapping[str, object]]) -> Iterator[str]:
    order = sorted(pairs, key=lambda row: float(str(row["spearman"])))
    least, most = order[0], order[-1]
    yield (
        f"Most alike: {most['first']} and {most['second']} (Spearman {most['spearman']}); least: {least['first']} and "
        f"{least['second']} ({least['spearman']}). Every pair is in results.json."
    )


def _agreement(pairs: Sequence[Mapping[str, object]]) -> Table:
    """A matrix of Spearman's correlations, which reads better than a hundred lines."""
    names = list(dict.fromkeys(str(row[end]) for row in pairs for end in ("first", "second")))
    value = {(str(row["first"]), str(row["second"])): f"{float(str(row['spearman'])):.2f}" for row in pairs}
    rows: list[dict[str, Any]] = [
        {"": one} | {other: value.get((one, other), value.get((other, one), "")) for other in names} for one in names
    ]
    return Table("Spearman's correlation of the maps, mean over images", rows)


def _size_words(found: Mapping[str, Estimate]) -> str:
    searched = found[f"counterfactual/size_searched/{SEARCH}"]
    return (
        "The share of the patches whose removal turns the prediction: the shortest beginning of each map's order, and "
        f"a greedy search for small sets on the first {searched.n} images, which no order can be expected to beat. The "
        "fewer a map needs, the better it finds what holds the prediction up."
    )


def _sizes(names: Sequence[str], found: Mapping[str, Estimate]) -> Table:
    rows = []
    for name in (*names, SEARCH):
        every, turned = found.get(f"counterfactual/size/{name}"), found.get(f"counterfactual/turned/{name}")
        first = found.get(f"counterfactual/size_searched/{name}")
        rows.append({"order": name, "patches to go": every, "turned at all": turned, "on the searched images": first})
    return Table("Share of the patches that must go", rows)
