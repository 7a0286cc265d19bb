"""Which of a model's maps may be trusted: the answer, the five best methods, and what could overturn it."""

from collections.abc import Callable, Iterator
from typing import Final

from vitlens.commands.explain.conclusions import is_paired
from vitlens.commands.explain.evidence_record import SUBSTRATE_AGREEMENTS
from vitlens.commands.explain.record import COUNTERFACTUALS, SEARCH, SIZE_SEARCHED
from vitlens.commands.explain.report.evidence import agreement_words, power_sentences
from vitlens.commands.explain.report.league import League, curves_figure, league_figure, leagues
from vitlens.commands.explain.report.maps import best_sentences, target_words
from vitlens.commands.shared.maps.findings import listed
from vitlens.commands.shared.maps.judged import CHECK_WORDS, JudgedMap, cascade_words, in_three_decimals
from vitlens.commands.shared.maps.rows import INSERTION
from vitlens.records import Record
from vitlens.report.document import Cell, Section, Sentence, Table
from vitlens.report.numbers import number
from vitlens.uncertainty import Side, beyond

_BEST: Final = 5  # methods in the table of those to trust
_SUBSTRATES: Final = (
    "Removing patches gives images unlike the training images, and a probability can fall because of the removal itself"
)


def trust_section(league: League) -> Section:
    """Which map may be trusted: the five best methods with one verdict each, and the curves behind it."""
    return Section(
        f"Which map to trust{league.of}",
        (
            *_trusted(league),
            *best_sentences(league.record, league.names),
            *power_sentences(league),
            *_unpaired(league),
            Sentence(CHECK_WORDS, says="method"),
        ),
        (_trust_table(league),),
        (league_figure(league), curves_figure(league)),
        leading=True,
    )


def league_limits(record: Record) -> Iterator[Sentence]:
    """What could overturn the verdicts on the maps, with the numbers of this run; nothing without --verify."""
    for league in list(leagues(record))[:1]:
        best, settings = league.judged[0].check, league.settings
        yield Sentence(
            f"{_SUBSTRATES}; the verdicts are those of {_replaced(league)}. {_other_words(league)}",
            (best, *league.methods, *record.rows(SUBSTRATE_AGREEMENTS)),
        )
        yield Sentence(
            f"The intervals of {league.alias} cover the choice of {settings.images:,} images, whose maps explain "
            f"{target_words(record)}; images of another kind, and other classes, may have another best method.",
            (settings,),
        )
        yield Sentence(
            f"Passing the randomisation check (at most {settings.randomised} images, one permutation of the weights of "
            f"{league.alias}, running statistics of batch norm kept) is necessary, not sufficient: it shows that a map "
            "depends on the weights, "
            "not that it is right.",
            (settings,),
        )
        area = league.estimate("roc_auc", best.method)
        if area is not None:
            yield Sentence(
                f"That {best.method} has a ROC-AUC of {number(area.value, 3)} on the objects' masks is agreement with "
                "what a person expects: a model may use the background, and a faithful map then lies partly outside.",
                (area, best),
            )
        if record.has(COUNTERFACTUALS, model=league.alias):
            searched = record.metric(SIZE_SEARCHED(model=league.alias, method=SEARCH))
            yield Sentence(
                f"Neither the orders of the maps nor the greedy search on {searched.n or 0} images prove that no "
                "smaller set of patches changes a prediction.",
                (searched, searched.n or 0),
            )


def _replaced(league: League) -> str:
    """What stood in place of removed patches when the methods were judged."""
    return f"patches replaced by {league.substrate}" if league.judged_by == INSERTION else "patches imputed by ROAD"


def _other_words(league: League) -> str:
    """What other replacements say: the least agreement of the rankings, or ROAD's best method."""
    rows = [row for row in league.record.rows(SUBSTRATE_AGREEMENTS) if row.model == league.alias]
    if not rows:
        return _road_words(league)
    least, swapped = min(rows, key=lambda row: row.tau), sum(row.swapped for row in rows)
    places = (
        f"{swapped} times a pair of methods is shown to change" if swapped else "no pair of methods is shown to change"
    )
    return f"With others {places} places ({agreement_words(least)}). {_road_words(league)}"


def _road_words(league: League) -> str:
    """Whether insertion minus deletion has the same best method as ROAD, by which maps are judged where it was run."""
    first = max((each.check for each in league.judged), key=lambda check: check.gap)
    best = league.judged[0].check
    if best.judged_by == INSERTION:
        return "ROAD, which imputes removed patches, was not run."
    if first.method == best.method:
        return f"Insertion − deletion has the same best method as ROAD, {best.method}."
    return f"Insertion − deletion has another best method than ROAD: {first.method} instead of {best.method}."


def _trusted(league: League) -> Iterator[Sentence]:
    """The answer: the best method, then the others that pass, and those that fail the randomisation check."""
    best = league.judged[0]
    count, images = len(league.judged), best.check.images
    of = f"Of {count} method{'s' if count > 1 else ''} on {images:,} image{'s' if images > 1 else ''}"
    backing = (best.check, league.settings, *league.methods)
    if best.state == "pass" and best.margin is not None:
        yield Sentence(
            f"{of}, **{best.check.method}** may be trusted most for **{league.alias}**: its {best.check.judged_by}, "
            f"{in_three_decimals(best.check.estimate)}, exceeds that of {best.harder}, the harder of two baselines "
            f"that ignore the model, by {in_three_decimals(best.margin)}, and its maps change when the weights do.",
            (*backing, best.margin),
        )
    elif best.state == "warn":
        yield Sentence(
            f"{of}, none that passes the randomisation check is shown to be more faithful for **{league.alias}** than "
            f"a map of the centre, which ignores the model; **{best.check.method}** is the best of those that pass it "
            "and exceed a random map.",
            backing,
        )
    elif best.state == "inconclusive":
        yield Sentence(
            f"{of}, none can be judged for **{league.alias}**; of the best, {best.check.method}: {best.because}.",
            backing,
        )
    else:
        yield Sentence(
            f"{of}, none may be trusted for **{league.alias}**; of the best, {best.check.method}: {best.because}.",
            backing,
        )
    open_ = [each for each in league.judged if each.state == "inconclusive" and _exceeds_both(each)]
    if open_ and best.state != "inconclusive":
        yield Sentence(
            f"{listed([each.check.method for each in open_])} exceed{'' if len(open_) > 1 else 's'} both baselines, "
            "but the randomisation check is inconclusive.",
            tuple(each.check for each in open_),
        )
    others = [each for each in league.judged[1:] if each.state == "pass"]
    if others:
        names = ", ".join(each.check.method for each in others)
        yield Sentence(f"The checks are passed by {names}, too.", tuple(each.check for each in others))


def _exceeds_both(each: JudgedMap) -> bool:
    return each.margin is not None and beyond(each.margin, 0.0) is Side.ABOVE


def _unpaired(league: League) -> Iterator[Sentence]:
    """That a folder of an earlier version has no paired differences."""
    if not is_paired(league.record, league.alias):
        yield Sentence(
            "This run recorded no differences image by image: those from the baselines have the intervals of "
            "independent means, which are wider, so that a method that the paired test puts above a baseline (last "
            "column of the table of all checks) can be judged `warn` here.",
            says="method",
        )


def _trust_table(league: League) -> Table:
    """The five best methods, one verdict each."""
    columns: dict[str, Callable[[JudgedMap], Cell]] = {
        "method": lambda each: each.check.method,
        "verdict": lambda each: each.state,
        league.judged[0].check.judged_by: lambda each: in_three_decimals(each.check.estimate),
        "beyond the harder baseline": lambda each: in_three_decimals(each.margin),
        "that baseline": lambda each: each.harder,
        "weights randomised": lambda each: cascade_words(each.check.cascade),
        "because": lambda each: each.because,
    }
    shown = league.judged[:_BEST]
    more = f" {len(shown)} best of {len(league.judged)} methods" if len(league.judged) > _BEST else " methods"
    return Table.of(f"{league.alias}: the{more}, one verdict each", shown, columns)
