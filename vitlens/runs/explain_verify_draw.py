"""The league of explanation methods as a run's folder holds it, and its figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitlens.analysis.faithfulness.league import BASELINES
from vitlens.figures.counterfactual import counterfactual_panels
from vitlens.figures.league import Column, fidelity_curves, league_figure
from vitlens.files import RunRecord
from vitlens.runs.explain_verify_more import SEARCH
from vitlens.runs.report import Drawn
from vitlens.runs.sections import metrics
from vitlens.uncertainty import Estimate

_CURVES = 8  # methods in the figure of curves, the best by gap
_PANELS = 5  # methods beside each other in the figure of counterfactuals
_COLUMNS = (  # metric, title in a figure, what is better, value of chance
    ("faithfulness/gap", "insertion − deletion", "more", 0.0),
    ("faithfulness/deletion", "deletion, area", "less", None),
    ("faithfulness/insertion", "insertion, area", "more", None),
    ("faithfulness/road", "ROAD, LeRF − MoRF", "more", 0.0),
    ("localisation/roc_auc", "ROC-AUC on the mask", "more", 0.5),
    ("localisation/pointing", "pointing game", "more", None),
    ("randomisation", "Spearman, weights randomised", "less", 0.0),
    ("counterfactual/size", "patches to turn it (share)", "less", None),
)
SUBSTRATE_WORDS = {
    "blur": "the image blurred (Gaussian, an eighth of the shorter side)",
    "mean": "the image's mean colour",
    "black": "black",
    "absent": "nothing: the token is left out of the sequence",
}


@dataclass(frozen=True)
class League:
    """One model's league: its metrics by name (without the alias), rows, pairs of methods, and settings; suffix: of its
    figures, empty where the run has one model."""

    alias: str
    found: Mapping[str, Estimate]
    rows: Sequence[Mapping[str, object]]
    pairs: Sequence[Mapping[str, object]]
    settings: Mapping[str, Any]
    suffix: str

    @property
    def names(self) -> list[str]:
        """The methods, baselines among them, the most faithful first."""
        return [str(row["method"]) for row in self.rows]


def leagues(record: RunRecord) -> list[League]:
    """The league of every model of a run, in the run's order."""
    settings, found = record.table("league_settings"), metrics(record)
    several = len(settings) > 1
    leagues = []
    for one in settings:
        alias = str(one["model"])
        parts = {tuple(name.split("/")): value for name, value in found.items()}
        own = {
            "/".join(words if not several else (words[0], *words[2:])): value
            for words, value in parts.items()
            if not several or words[1:2] == (alias,)
        }
        rows, pairs = ([row for row in record.table(name) if row["model"] == alias] for name in ("league", "agreement"))
        leagues.append(League(alias, own, rows, pairs, one, f"_{alias}" if several else ""))
    return leagues


def draw_league(record: RunRecord) -> Iterator[Drawn]:
    """For every model the league, the curves of deletion and insertion, and counterfactuals of its first images."""
    for one in leagues(record):
        yield from _draw(record, one)


def _draw(record: RunRecord, league: League) -> Iterator[Drawn]:
    found, rows, names = league.found, league.rows, league.names
    flagged = [str(row["method"]) for row in rows if row["flagged"]]
    columns = [
        _column(league, metric, title, better, chance)
        for metric, title, better, chance in _COLUMNS
        if any(f"{metric}/{method}" in found for method in names)
    ]
    settings = league.settings
    n = int(settings["images"])
    figure = league_figure(
        methods=names,
        columns=columns,
        baselines=BASELINES,
        flagged=flagged,
        title=f"{league.alias}: explanation methods in every check, mean and 95 % interval over {n:,} images",
    )
    yield Drawn(f"league{league.suffix}", figure, _league_caption(settings))
    arrays: Any = record.arrays(f"league-{league.alias}")
    place = {str(name): index for index, name in enumerate(arrays["methods"])}
    shown = [name for name in league.names if name not in BASELINES][:_CURVES] + list(BASELINES)
    curves = fidelity_curves(
        shares=arrays["shares"],
        inserted=arrays["inserted"],
        deletion={name: arrays["deletion"][place[name]] for name in shown},
        insertion={name: arrays["insertion"][place[name]] for name in shown},
        baselines=BASELINES,
        substrate=str(settings["substrate"]),
        title=f"{league.alias}: what is left of the target as patches go and come, mean of {n:,} images",
    )
    yield Drawn(f"faithfulness{league.suffix}", curves, _curves_caption(settings, len(names) - len(BASELINES)))
    if record.has_arrays(f"counterfactuals-{league.alias}"):
        yield _counterfactuals(record, league)


def _column(league: League, metric: str, title: str, better: str, chance: float | None) -> Column:
    """One check of every method; NaN where a method has no number."""
    estimates = [league.found.get(f"{metric}/{name}") for name in league.names]
    value, low, high = (
        [float("nan") if one is None or getattr(one, end) is None else float(getattr(one, end)) for one in estimates]
        for end in ("value", "low", "high")
    )
    return Column(title, value, low, high, better, chance)


def _counterfactuals(record: RunRecord, league: League) -> Drawn:
    arrays: Any = record.arrays(f"counterfactuals-{league.alias}")
    known = [str(name) for name in arrays["methods"]]
    own = [name for name in league.names if name not in BASELINES]
    shown = [*own[: _PANELS - 2], BASELINES[0], SEARCH]
    places = [known.index(name) for name in shown]
    classes = [str(name) for name in arrays["classes"]]
    figure = counterfactual_panels(
        images=arrays["images"] / np.float32(255),
        removed=arrays["removed"][:, places],
        titles=shown,
        names=[classes[index] for index in arrays["prediction"]],
        turned=[[classes[index] for index in row] for row in arrays["turned"][:, places]],
        title=f"{league.alias}: the patches whose removal turns the prediction (grey)",
    )
    caption = (
        "Counterfactuals. Below each input its prediction; below each panel how many patches went and what is "
        "predicted without them. Grey stands for removed; the model saw the substrate in their place. The best methods "
        "of the league by insertion − deletion, a random order, and the greedy search. Few patches need not be "
        "all that matters: others may hold the prediction up together."
    )
    return Drawn(f"counterfactuals{league.suffix}", figure, caption)


def _league_caption(settings: Mapping[str, Any]) -> str:
    return (
        f"Every method in every check; dashed: chance, where it has one value. Removed patches show "
        f"{SUBSTRATE_WORDS[str(settings['substrate'])]}; the randomisation check has {settings['randomised']} images. "
        "Methods stand in the order of insertion − deletion. Columns have scales of their own: compare within a column."
    )


def _curves_caption(settings: Mapping[str, Any], methods: int) -> str:
    best = f"The {_CURVES} best of {methods} methods by insertion − deletion, and the baselines"
    some = best if methods > _CURVES else "All methods and the baselines"
    return (
        f"{some}. A good map's curve falls early at the left and rises early at the right. Removed patches show "
        f"{SUBSTRATE_WORDS[str(settings['substrate'])]}. What is left when all are gone is what that still tells."
    )
