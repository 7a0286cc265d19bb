"""All checks of one model's methods: summary, table and figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

from vitlens.commands.explain.options import ExplainOptions
from vitlens.commands.explain.record import (
    AGREEMENTS,
    CHECKS,
    COUNTERFACTUALS,
    CURVES,
    FORWARDS,
    LEAGUE,
    SETTINGS,
    LeagueArrays,
    LeagueRow,
    LeagueSettingsRow,
    MethodAgreementRow,
)
from vitlens.names import Substrate
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table, sentences
from vitlens.report.numbers import number
from vitlens.uncertainty import Estimate, Side, apart

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.figures.league import Column

SUBSTRATE_WORDS: Final[Mapping[Substrate, str]] = {
    "blur": "the image blurred (Gaussian, an eighth of the shorter side)",
    "mean": "the image's mean colour",
    "black": "black",
    "absent": "nothing: the token is left out of the sequence",
}
_CURVES: Final = 8  # methods in the figure of curves, those of greatest insertion minus deletion
_PANELS: Final = (  # column of the league, title in its figure, what is better, value of chance
    ("gap", "insertion − deletion", "more", 0.0),
    ("deletion", "deletion, area", "less", None),
    ("insertion", "insertion, area", "more", None),
    ("road", "ROAD, LeRF − MoRF", "more", 0.0),
    ("roc_auc", "ROC-AUC on the mask", "more", 0.5),
    ("pointing", "pointing game", "more", None),
    ("randomisation", "Spearman, weights randomised", "less", 0.0),
    ("size", "patches to change it (share)", "less", None),
)
_COLUMNS: Final = {  # of the league's table: column, title
    "gap": "insertion − deletion",
    "deletion": "deletion",
    "insertion": "insertion",
    "road": "ROAD",
    "roc_auc": "ROC-AUC",
    "pointing": "pointing",
    "randomisation": "weights randomised",
}
_LIMITS: Final = (
    "Removing patches gives images unlike the training images: a deletion curve can also fall because of the removal "
    "itself. Insertion, ROAD and other substrates test the same in other ways; results on which they agree are more "
    "reliable.",
    "Localisation measures agreement with what a person expects, not whether the model uses the object: a model may "
    "use the background, and a faithful map then lies partly outside the mask.",
    "Passing the randomisation check is necessary, not sufficient. The check permutes the entries of each weight "
    "tensor, from the head down; the running statistics of batch norm are kept.",
)
_SEARCH_LIMIT: Final = (
    "Neither the orders of the maps nor the greedy search prove that no smaller set of patches exists. Where no "
    "removal changes the prediction, all patches are counted."
)


@dataclass(frozen=True)
class League:
    """One model's methods, baselines among them, in every check, the greatest insertion minus deletion first."""

    record: Record
    settings: LeagueSettingsRow
    rows: tuple[LeagueRow, ...]
    pairs: tuple[MethodAgreementRow, ...]

    @property
    def alias(self) -> str:
        """The model."""
        return self.settings.model

    @property
    def of(self) -> str:
        """The model in titles, where the run has several."""
        return f" ({self.alias})" if len(self.record.aliases) > 1 else ""

    @property
    def suffix(self) -> str:
        """The model in the names of figures, where the run has several."""
        return f"_{self.alias}" if len(self.record.aliases) > 1 else ""

    @property
    def names(self) -> tuple[str, ...]:
        """The methods, baselines among them."""
        return tuple(row.method for row in self.rows)

    @property
    def methods(self) -> tuple[LeagueRow, ...]:
        """The rows of the methods without the baselines."""
        return tuple(row for row in self.rows if not row.baseline)

    @cached_property
    def baselines(self) -> tuple[str, ...]:
        """The baselines, in the order in which they were checked."""
        known = {row.method for row in self.rows if row.baseline}
        return tuple(name for name in self.curves.methods.tolist() if name in known)

    @cached_property
    def curves(self) -> LeagueArrays:
        """The mean curves of deletion and insertion."""
        return self.record.arrays(CURVES, model=self.alias)

    @property
    def substrate(self) -> str:
        """What replaces removed patches, in words."""
        return SUBSTRATE_WORDS[self.settings.substrate]

    def estimate(self, column: str, method: str) -> Estimate | None:
        """A number of the league with its interval; None where the check gave none."""
        return self.record.metrics.get(CHECKS[column](model=self.alias, method=method))

    def has(self, column: str) -> bool:
        """Whether a check gave a number for any method."""
        return any(self.estimate(column, name) is not None for name in self.names)


def leagues(record: Record) -> Iterator[League]:
    """The league of every model, in the run's order; none without --verify."""
    for settings in record.rows(SETTINGS):
        rows = tuple(row for row in record.rows(LEAGUE) if row.model == settings.model)
        yield League(
            record, settings, rows, tuple(row for row in record.rows(AGREEMENTS) if row.model == settings.model)
        )


def league_section(league: League) -> Section:
    """All checks of all methods."""
    return Section(
        f"Checks of the methods{league.of}",
        tuple(_summary(league)),
        (_table(league),),
        (_league_figure(league), _curves_figure(league)),
    )


def league_limits(record: Record) -> tuple[Sentence, ...]:
    """The limits of the checks; nothing without --verify."""
    if not record.options(ExplainOptions).verify:
        return ()
    searched = any(record.has(COUNTERFACTUALS, model=row.model) for row in record.rows(SETTINGS))
    return sentences(*_LIMITS, _SEARCH_LIMIT if searched else None)


def in_three_decimals(one: Estimate | None) -> Cell:
    """A number with its interval in three decimals, for a table of many columns."""
    if one is None or one.low is None or one.high is None:
        return None if one is None else f"{one.value:.3f}"
    return f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})"


def _summary(league: League) -> Iterator[Sentence]:
    methods = league.methods
    yield Sentence(
        f"{len(methods)} methods on {league.settings.images:,} images. Removed patches are replaced by "
        f"{league.substrate}. Areas and probabilities are fractions; insertion − deletion is the difference of the two "
        "areas, 0 for a random order. A verdict calls a method better than a baseline where the paired 95 % interval "
        "of the difference, over the same images, lies above 0.",
        methods,
    )
    faithful = _listed(row for row in methods if _beats_baselines(league, row.method, "gap"))
    yield Sentence(
        "More faithful than both baselines, random and centre (95 % intervals of insertion − deletion do not overlap): "
        f"{faithful}.",
        methods,
    )
    if league.has("roc_auc"):
        localised = _listed(row for row in methods if _beats_baselines(league, row.method, "roc_auc"))
        yield Sentence(
            f"Better localised than both baselines (95 % intervals of ROC-AUC do not overlap): {localised}.", methods
        )
    yield Sentence(
        "Flagged, as their maps hardly change when the weights are randomised (mean Spearman correlation 0.5 or more): "
        f"{_listed(row for row in methods if row.flagged)}.",
        methods,
    )
    for row in methods:
        if row.faults:
            yield Sentence(f"**{row.method}: {row.faults}**; such maps are not usable.", (row,))


def _beats_baselines(league: League, method: str, column: str) -> bool:
    """Whether a method's interval lies wholly above that of every baseline."""
    own = league.estimate(column, method)
    others = [league.estimate(column, base) for base in league.baselines]
    return own is not None and all(other is not None and apart(own, other) is Side.ABOVE for other in others)


def _listed(rows: Iterator[LeagueRow]) -> str:
    return ", ".join(row.method for row in rows) or "none"


def _table(league: League) -> Table:
    """The main checks of each method, its cost and the verdict."""
    shown = {column: title for column, title in _COLUMNS.items() if league.has(column)}
    rows: list[tuple[Cell, ...]] = []
    for row in league.rows:
        forwards = league.record.metrics.get(FORWARDS(model=league.alias, method=row.method))
        rows.append(
            (
                row.method,
                *(in_three_decimals(league.estimate(column, row.method)) for column in shown),
                "–" if forwards is None else number(forwards.value),
                number(1000 * row.seconds),
                row.verdict,
            )
        )
    return Table("League", ("method", *shown.values(), "forwards", "ms an image", "verdict"), tuple(rows))


def _league_figure(league: League) -> FigureSpec:
    caption = (
        f"All methods in all checks; dashed: the chance level, where it is one value. Removed patches are replaced by "
        f"{league.substrate}; the randomisation check has {league.settings.randomised} images. Methods are sorted by "
        "insertion − deletion. Scales differ between columns."
    )
    return FigureSpec(f"league{league.suffix}", caption, partial(_draw_league, league))


def _draw_league(league: League) -> "Figure":
    from vitlens.figures.league import league_figure

    return league_figure(
        methods=league.names,
        columns=[
            _column(league, column, title, better, chance)
            for column, title, better, chance in _PANELS
            if league.has(column)
        ],
        baselines=league.baselines,
        flagged=[row.method for row in league.rows if row.flagged],
        title=f"{league.alias}: explanation methods in every check, mean and 95 % interval over "
        f"{league.settings.images:,} images",
    )


def _column(league: League, column: str, title: str, better: str, chance: float | None) -> "Column":
    """One check of every method; NaN where a method has no number."""
    from vitlens.figures.league import Column

    undefined = Estimate(float("nan"))
    estimates = [league.estimate(column, name) or undefined for name in league.names]
    return Column(
        title,
        [estimate.value for estimate in estimates],
        [float("nan") if estimate.low is None else estimate.low for estimate in estimates],
        [float("nan") if estimate.high is None else estimate.high for estimate in estimates],
        better,
        chance,
    )


def _curves_figure(league: League) -> FigureSpec:
    methods = len(league.methods)
    best = f"The {_CURVES} best of {methods} methods by insertion − deletion, and the baselines"
    curves = best if methods > _CURVES else "All methods and the baselines"
    caption = (
        f"{curves}. The curve of a faithful method falls early at the left and rises early at the right. Removed "
        f"patches are replaced by {league.substrate}. The probability after the removal of all patches is that of the "
        "substrate alone."
    )
    return FigureSpec(f"faithfulness{league.suffix}", caption, partial(_draw_curves, league))


def _draw_curves(league: League) -> "Figure":
    from vitlens.figures.league import fidelity_curves

    arrays = league.curves
    place = {name: index for index, name in enumerate(arrays.methods.tolist())}
    shown: Sequence[str] = [*[row.method for row in league.methods][:_CURVES], *league.baselines]
    return fidelity_curves(
        shares=arrays.shares,
        inserted=arrays.inserted,
        deletion={name: arrays.deletion[place[name]] for name in shown},
        insertion={name: arrays.insertion[place[name]] for name in shown},
        baselines=league.baselines,
        substrate=league.settings.substrate,
        title=f"{league.alias}: probability of the target as patches are removed and inserted, mean of "
        f"{league.settings.images:,} images",
    )
