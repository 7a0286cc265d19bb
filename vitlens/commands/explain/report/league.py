"""All checks of one model's methods: summary, table and figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final

from vitlens.analysis.faithfulness.cascade import SIMILAR
from vitlens.commands.explain.conclusions import checks_of
from vitlens.commands.explain.record import (
    AGREEMENTS,
    CHECKS,
    CURVES,
    FORWARDS,
    LEAGUE,
    SETTINGS,
    LeagueArrays,
    LeagueRow,
    LeagueSettingsRow,
    MethodAgreementRow,
)
from vitlens.commands.shared.maps.judged import (
    JudgedMap,
    in_three_decimals,
    judged_maps,
)
from vitlens.commands.shared.maps.on_object import ON_OBJECT, OnObjectRow
from vitlens.names import Substrate
from vitlens.records import Record
from vitlens.report.document import Cell, FigureSpec, Section, Sentence, Table
from vitlens.report.numbers import number
from vitlens.uncertainty import Estimate, Side

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlens.figures.league import Column

SUBSTRATE_WORDS: Final[Mapping[Substrate, str]] = {
    "blur": "the image blurred (Gaussian, an eighth of the shorter side)",
    "mean": "the image's mean colour",
    "black": "black",
    "absent": "nothing: the token is left out of the sequence",
}
_CURVES: Final = 8  # methods in the figure of curves, the best by the score that judges
_RANDOMISED: Final = "randomisation"
_PANELS: Final = (  # column of the league, title in its figure, what is better, value of chance
    ("gap", "insertion − deletion", "more", 0.0),
    ("deletion", "deletion, area", "less", None),
    ("insertion", "insertion, area", "more", None),
    ("road", "ROAD, LeRF − MoRF", "more", 0.0),
    ("roc_auc", "ROC-AUC on the mask", "more", 0.5),
    ("pointing", "pointing game", "more", None),
    (_RANDOMISED, "Spearman, upper half random", "less", SIMILAR),
    ("size", "patches to change it (share)", "less", None),
)
_COLUMNS: Final = {  # of the league's table: column, title
    "gap": "insertion − deletion",
    "deletion": "deletion",
    "insertion": "insertion",
    "road": "ROAD",
    "roc_auc": "ROC-AUC",
    "pointing": "pointing",
    _RANDOMISED: "all weights randomised",
}


@dataclass(frozen=True)
class League:
    """One model's methods, baselines among them, in every check, the best first; judged:
    the methods with their verdicts, the best first."""

    record: Record
    settings: LeagueSettingsRow
    rows: tuple[LeagueRow, ...]
    pairs: tuple[MethodAgreementRow, ...]
    judged: tuple[JudgedMap, ...]

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
    def judged_by(self) -> str:
        """By what methods are ranked and judged."""
        return self.judged[0].check.judged_by

    @property
    def substrate(self) -> str:
        """What replaces removed patches, in words."""
        return SUBSTRATE_WORDS[self.settings.substrate]

    def estimate(self, column: str, method: str) -> Estimate | None:
        """A number of the league with its interval; None where the check gave none."""
        return self.record.metrics.get(CHECKS[column](model=self.alias, method=method))

    def on_object(self, score: str) -> tuple[OnObjectRow, ...]:
        """The rows of one score of this model's methods on the masks, beside maps that ignore the image."""
        rows = self.record.rows(ON_OBJECT)
        return tuple(row for row in rows if row.model == self.alias and row.score == score)

    def has(self, column: str) -> bool:
        """Whether a check gave a number for any method."""
        return any(self.estimate(column, name) is not None for name in self.names)


def leagues(record: Record) -> Iterator[League]:
    """The league of every model, in the run's order; none without --verify."""
    for settings in record.rows(SETTINGS):
        rows = tuple(row for row in record.rows(LEAGUE) if row.model == settings.model)
        pairs = tuple(row for row in record.rows(AGREEMENTS) if row.model == settings.model)
        yield League(record, settings, rows, pairs, judged_maps(checks_of(record, settings.model)))


def league_section(league: League) -> Section:
    """All checks of all methods."""
    return Section(f"Checks of the methods{league.of}", tuple(_summary(league)), (_table(league),))


def _summary(league: League) -> Iterator[Sentence]:
    methods = league.methods
    checks = tuple(each.check for each in league.judged)
    for state, words in (
        ("pass", "Passed by"),
        ("warn", "More faithful than a random map alone"),
        ("fail", "Failed by"),
    ):
        names = [each.check.method for each in league.judged if each.state == state]
        if names:
            yield Sentence(f"{words}: {', '.join(names)}.", checks)
    if league.has("roc_auc"):
        rows = league.on_object("roc_auc")
        localised = ", ".join(row.maps for row in rows if row.side is Side.ABOVE) or "none"
        yield Sentence(
            "Better localised than any map that ignores the image (the 95 % interval of the paired difference of "
            f"ROC-AUC lies above 0): {localised}.",
            rows,
        )
    for row in methods:
        if row.faults:
            yield Sentence(f"**{row.method}: {row.faults}**; such maps are not usable.", (row,))
    yield Sentence(
        f"Removed patches are replaced by {league.substrate}. Areas and probabilities are fractions; insertion − "
        "deletion is the difference of the two areas, 0 for a random order. The last column of the table of all checks "
        "says, method by method, which baselines it is shown to beat at the plain 95 %, in faithfulness and in "
        "localisation.",
        says="method",
    )


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


def league_figure(league: League) -> FigureSpec:
    """All methods in all checks."""
    caption = (
        "All methods in all checks; dashed: the chance level, where it is one value, or the threshold of the "
        "randomisation check, of which the stage that decides is shown (with the head and the upper half of the blocks "
        f"random, or the stage above of a smaller correlation; at most {league.settings.randomised} images). Removed "
        f"patches are replaced by {league.substrate}. Methods are sorted by "
        f"{league.judged_by}; scales differ."
    )
    return FigureSpec(f"league{league.suffix}", caption, partial(_draw_league, league))


def _draw_league(league: League) -> "Figure":
    from vitlens.figures.league import league_figure as drawn

    return drawn(
        methods=league.names,
        columns=[
            _column(league, column, title, better, chance)
            for column, title, better, chance in _PANELS
            if league.has(column)
        ],
        baselines=league.baselines,
        flagged=[each.check.method for each in league.judged if _fails_randomisation(each)],
        title=f"{league.alias}: explanation methods in every check, mean and 95 % interval over "
        f"{league.settings.images:,} images",
    )


def _fails_randomisation(each: JudgedMap) -> bool:
    return each.check.cascade is not None and each.check.cascade.state == "fails"


def _column(league: League, column: str, title: str, better: str, chance: float | None) -> "Column":
    """One check of every method; NaN where a method has no number."""
    from vitlens.figures.league import Column

    undefined = Estimate(float("nan"))
    decisive = {each.check.method: each.check.cascade.similarity for each in league.judged if each.check.cascade}
    by_name = decisive.get if column == _RANDOMISED else partial(league.estimate, column)
    estimates = [by_name(name) or undefined for name in league.names]
    return Column(
        title,
        [estimate.value for estimate in estimates],
        [float("nan") if estimate.low is None else estimate.low for estimate in estimates],
        [float("nan") if estimate.high is None else estimate.high for estimate in estimates],
        better,
        chance,
    )


def curves_figure(league: League) -> FigureSpec:
    """The curves of the best methods and of the baselines."""
    methods = len(league.methods)
    best = f"The {_CURVES} best of {methods} methods by {league.judged_by}, and the baselines"
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
