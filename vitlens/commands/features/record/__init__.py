"""The tables and metrics of `vitlens features`; its arrays are in arrays.py."""

from vitlens.commands.features.arrays import ARRAYS
from vitlens.commands.features.record.patch_rows import MatchesRow, PatchColoursRow, PatchNeighboursRow
from vitlens.commands.features.record.pretraining_rows import PretrainingRow
from vitlens.commands.features.record.rows import (
    DepthRow,
    FeatureDataRow,
    FeatureNoteRow,
    FeaturePairRow,
    FeaturesRow,
    LastLayerHeadsRow,
    MarkedErrorsRow,
    NoZeroShotRow,
    PromptRow,
    RetrievalRow,
    SimilarityRow,
    SpaceRow,
    TemplateRow,
)
from vitlens.records import Contents, MetricName, TableOf

DATA = TableOf("images", FeatureDataRow)
FEATURES = TableOf("features", FeaturesRow)
DEPTH = TableOf("depth", DepthRow)
MARKS = TableOf("marks", MarkedErrorsRow)
NOTES = TableOf("notes", FeatureNoteRow)
PAIRS = TableOf("pairs", FeaturePairRow)
HEAD_DIFFERENCES = TableOf("head", FeaturePairRow, optional=True)
SIMILARITY = TableOf("similarity", SimilarityRow)
SPACE = TableOf("space", SpaceRow)
PATCHES = TableOf("patches", PatchColoursRow)
MATCHES = TableOf("matches", MatchesRow)
RETRIEVAL = TableOf("retrieval", RetrievalRow)
HEADS = TableOf("heads", LastLayerHeadsRow)
TEMPLATES = TableOf("templates", TemplateRow)
NO_ZERO_SHOT = TableOf("silent", NoZeroShotRow)
PROMPTS = TableOf("prompts", PromptRow)
PRETRAINING = TableOf("pretraining", PretrainingRow, optional=True)
SHARED = TableOf("shared", PatchNeighboursRow, optional=True)

ACCURACY = MetricName("accuracy/{model}")  # of the model's own classifier
KNN = MetricName("knn_accuracy/{model}/{k}")
KNN_MAJORITY = MetricName("knn_majority_accuracy/{model}/{k}")
PROBE_ACCURACY = MetricName("probe_accuracy/{model}")
RETRIEVAL_PRECISION = MetricName("retrieval_precision/{model}/{k}")
TRUSTWORTHINESS = MetricName("trustworthiness/{model}/{method}/{of}")
ZERO_SHOT = MetricName("zero_shot_accuracy/{model}")
KNN_DIFFERENCE = MetricName("knn_difference/{first}/{second}/{k}")
PROBE_DIFFERENCE = MetricName("probe_difference/{first}/{second}")
HEAD_DIFFERENCE = MetricName("head_difference/{model}/{classifier}")  # the classifier's accuracy minus the head's
PATCH_NEIGHBOURS = MetricName("patch_neighbours/{model}/{layer}/{share}")  # layer: "embedding", or its number
CKA = MetricName("cka/{first}/{second}/{layer}/{other}")  # layers: numbers, or "embedding"

RECORD = Contents(
    metrics=(
        ACCURACY, KNN, KNN_MAJORITY, PROBE_ACCURACY, RETRIEVAL_PRECISION, TRUSTWORTHINESS, ZERO_SHOT, KNN_DIFFERENCE,
        PROBE_DIFFERENCE, HEAD_DIFFERENCE, CKA, PATCH_NEIGHBOURS,
    ),
    tables=(
        DATA, FEATURES, DEPTH, MARKS, NOTES, PAIRS, HEAD_DIFFERENCES, SIMILARITY, SPACE, PATCHES, MATCHES, RETRIEVAL,
        HEADS, TEMPLATES, NO_ZERO_SHOT, PROMPTS, SHARED, PRETRAINING,
    ),
    arrays=ARRAYS,
)  # fmt: skip
