"""The record of `vitlens attack`: its tables, arrays and metrics."""

from vitlens.commands.attack.record.arrays import AttackedArrays, AttackExampleArrays
from vitlens.commands.attack.record.rows import (
    AttackCheckRow,
    AttackCurveRow,
    AttackRow,
    AttackSampleRow,
    AttentionShiftRow,
    BlockCosineRow,
    CorruptionKindRow,
    CorruptionRow,
    RobustClassRow,
    RobustPairRow,
    TransferRow,
)
from vitlens.records import ArraysOf, Contents, MetricName, TableOf

CURVES = TableOf("curves", AttackCurveRow)
ATTACKED = TableOf("attacks", AttackRow)
ROBUST_PAIRS = TableOf("pairs", RobustPairRow)
BY_CLASS = TableOf("by_class", RobustClassRow)
SAMPLE = TableOf("sample", AttackSampleRow)
TRANSFER = TableOf("transfer", TransferRow)
CHECKS = TableOf("checks", AttackCheckRow)
BLOCKS = TableOf("blocks", BlockCosineRow)
SHIFTS = TableOf("shifts", AttentionShiftRow)
CORRUPTED = TableOf("corruptions", CorruptionRow)
CORRUPTION_KINDS = TableOf("corruption_kinds", CorruptionKindRow)

IMAGES = ArraysOf("attack-{model}", AttackedArrays)
EXAMPLES = ArraysOf("examples-{model}", AttackExampleArrays)

ACCURACY = MetricName("accuracy/{model}")
ROBUST_ACCURACY = MetricName("robust_accuracy/{model}/{attack}/{epsilon}")
MEDIAN_DISTANCE = MetricName("median_distance/{model}/{attack}")
ROBUST_DIFFERENCE = MetricName("robust_difference/{first}/{second}/{attack}/{epsilon}")
TRANSFER_RATE = MetricName("transfer_rate/{made_for}/{shown_to}")
TRANSFER_ACCURACY = MetricName("transfer_accuracy/{made_for}/{shown_to}")
MAP_AGREEMENT = MetricName("map_agreement/{model}/{measure}/{maps}")
PARTING_BLOCK = MetricName("parting_block/{model}")
CORRUPTION_ACCURACY = MetricName("corruption_accuracy/{model}/{kind}/{severity}")
MEAN_ERROR = MetricName("mean_error_on_corruptions/{model}")
RELATIVE_ERROR = MetricName("corruption_error_over_clean/{model}")  # the mean error on corruptions in clean errors
MEAN_CORRUPTION_ERROR = MetricName("mean_corruption_error/{model}/{baseline}")

RECORD = Contents(
    metrics=(
        ACCURACY, ROBUST_ACCURACY, MEDIAN_DISTANCE, ROBUST_DIFFERENCE, TRANSFER_RATE, TRANSFER_ACCURACY, MAP_AGREEMENT,
        PARTING_BLOCK, CORRUPTION_ACCURACY, MEAN_ERROR, RELATIVE_ERROR, MEAN_CORRUPTION_ERROR,
    ),
    tables=(
        CURVES, ATTACKED, ROBUST_PAIRS, BY_CLASS, SAMPLE, TRANSFER, CHECKS, BLOCKS, SHIFTS, CORRUPTED, CORRUPTION_KINDS,
    ),
    arrays=(IMAGES, EXAMPLES),
)  # fmt: skip
