"""The record of `vitlens ablate`: its tables, arrays and metrics."""

from vitlens.commands.ablate.record.arrays import (
    ClassEffectArrays,
    ContributionArrays,
    EffectArrays,
    LensArrays,
    PatchingArrays,
    RedundancyArrays,
)
from vitlens.commands.ablate.record.head_rows import BrokenClassRow, HeadLabelRow, ReplacementDifferenceRow
from vitlens.commands.ablate.record.rows import (
    AblateNoteRow,
    ClassHeadRow,
    ContributionRow,
    EliminationRow,
    HeadPairRow,
    InsideNoteRow,
    LensClassRow,
    LensRow,
    PatchingRow,
    PrunedHeadsRow,
    PrunedRow,
    RedundancyRow,
    RemovalRow,
    ReplacementAgreementRow,
    UnitRow,
)
from vitlens.records import ArraysOf, Contents, MetricName, TableOf

FIRST_ORDER = "first-order"  # the name of the gradient estimate among rankings and orders of removal

NOTES = TableOf("notes", AblateNoteRow)
UNITS = TableOf("units", UnitRow)
AGREEMENT = TableOf("agreement", ReplacementAgreementRow)
CLASS_HEADS = TableOf("classes", ClassHeadRow)
CURVES = TableOf("curves", RemovalRow)
REDUNDANCY = TableOf("redundancy", RedundancyRow)
PAIRS = TableOf("pairs", HeadPairRow)
ELIMINATION = TableOf("adaptive", EliminationRow)
HEAD_LABELS = TableOf("head_labels", HeadLabelRow, optional=True)
HIDDEN = TableOf("hidden_by_mean", ReplacementDifferenceRow, optional=True)
BROKEN_CLASSES = TableOf("broken_classes", BrokenClassRow, optional=True)
PATCHING = TableOf("patching", PatchingRow)
LENS = TableOf("lens", LensRow)
LENS_CLASSES = TableOf("lens_classes", LensClassRow)
CONTRIBUTIONS = TableOf("contributions", ContributionRow)
INSIDE_NOTES = TableOf("inside_notes", InsideNoteRow)
PRUNED = TableOf("pruned", PrunedRow)
PRUNED_HEADS = TableOf("pruned_heads", PrunedHeadsRow)

EFFECT_ARRAYS = ArraysOf("effects-{replace}", EffectArrays)
CLASS_ARRAYS = ArraysOf("classes", ClassEffectArrays)
REDUNDANCY_ARRAYS = ArraysOf("redundancy", RedundancyArrays)
PATCHING_ARRAYS = ArraysOf("patching", PatchingArrays)
LENS_ARRAYS = ArraysOf("lens", LensArrays)
CONTRIBUTION_ARRAYS = ArraysOf("contributions", ContributionArrays)

ACCURACY = MetricName("accuracy/{model}")
CROSS_ENTROPY = MetricName("cross_entropy/{model}")
DELTA_LOSS = MetricName("importance/{model}/delta_loss/{layer}/{part}")  # part: the head's number, "mlp" or "block"
DELTA_ACCURACY = MetricName("importance/{model}/delta_accuracy/{layer}/{part}")
HEADS_THAT_MATTER = MetricName("heads_that_matter/{model}")
NO_EFFECT = MetricName("heads_without_effect/{model}")  # share shown to change the loss by less than judgement.py says
RANK_CORRELATION = MetricName("rank_correlation/{model}/first-order")
FORWARDS = MetricName("forward_equivalents/{model}/{what}")  # of a replacement, "greedy", "adaptive" or "exact"
REMOVABLE = MetricName("removable_share/{model}")
PARAMETERS_CUT = MetricName("parameters_cut/{model}")

RECORD = Contents(
    metrics=(
        ACCURACY,
        CROSS_ENTROPY,
        DELTA_LOSS,
        DELTA_ACCURACY,
        HEADS_THAT_MATTER,
        NO_EFFECT,
        RANK_CORRELATION,
        FORWARDS,
        REMOVABLE,
        PARAMETERS_CUT,
    ),
    tables=(
        NOTES,
        UNITS,
        AGREEMENT,
        CLASS_HEADS,
        CURVES,
        REDUNDANCY,
        PAIRS,
        HEAD_LABELS,
        HIDDEN,
        BROKEN_CLASSES,
        ELIMINATION,
        PATCHING,
        LENS,
        LENS_CLASSES,
        CONTRIBUTIONS,
        INSIDE_NOTES,
        PRUNED,
        PRUNED_HEADS,
    ),
    arrays=(EFFECT_ARRAYS, CLASS_ARRAYS, REDUNDANCY_ARRAYS, PATCHING_ARRAYS, LENS_ARRAYS, CONTRIBUTION_ARRAYS),
)
