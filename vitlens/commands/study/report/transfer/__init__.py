"""The report of a transfer study: the outcome first, why, what changed inside, and what to do."""

from collections.abc import Iterator

from vitlens.commands.study.report.transfer.attention import attention_section, head_appendix
from vitlens.commands.study.report.transfer.decision import findings, recommendation, verdicts, why_section
from vitlens.commands.study.report.transfer.facts import TransferFacts
from vitlens.commands.study.report.transfer.layers import feature_section, layer_appendix
from vitlens.commands.study.report.transfer.results import (
    convergence_section,
    difference_section,
    recipe_tables,
    result_section,
    share_section,
    training_section,
)
from vitlens.records import Record
from vitlens.report.document import Document, Section, Sentence
from vitlens.report.findings import ranked

__all__ = ["transfer_report"]


def transfer_report(record: Record) -> Document:
    """The regimes compared, the reasons with their numbers, what changed inside, the recommendation and the limits."""
    facts = TransferFacts.of(record)
    sections = (
        result_section(facts),
        why_section(facts),
        difference_section(facts),
        convergence_section(facts),
        share_section(facts),
        attention_section(facts),
        feature_section(facts),
        training_section(facts),
        recommendation(facts),
    )
    return Document(
        record.config.title,
        sections,
        limits=tuple(_limits(facts)),
        verdicts=tuple(verdicts(facts)),
        findings=ranked(findings(facts)),
        appendix=(
            head_appendix(facts),
            layer_appendix(facts),
            Section("Recipes", (), tuple(recipe_tables(facts))),
        ),
    )


def _limits(facts: TransferFacts) -> Iterator[Sentence]:
    """What could overturn the findings; at most five."""
    design = facts.design
    yield Sentence(
        f"One learning rate a regime, not searched on these images, and {design.epochs} epochs: training from scratch "
        "often needs many more epochs, so the advantage of transfer holds for this budget.",
        (design,),
    )
    yield Sentence(
        f"{design.seeds} seed{'' if design.seeds == 1 else 's'} and {design.test_images:,} test images: differences "
        "smaller than the intervals cannot be seen (--seeds, more test images).",
        (design,),
    )
    yield Sentence(
        "The model may have seen images of these classes in its own training; for another domain the features can be "
        "worth less.",
        (design,),
    )
    yield Sentence(
        f"Attention is compared head by head on {design.compared} images, and features on {design.similar}; the probe "
        "of random weights is that of one seed.",
        (design,),
    )
    yield Sentence(
        "Seconds were measured on this machine, including the effect of other programs that ran on it.", (design,)
    )
