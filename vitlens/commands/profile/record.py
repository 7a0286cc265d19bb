"""The rows, metrics and arrays that `vitlens profile` writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from vitlens.archives import Form
from vitlens.records import ArraysOf, Contents, MetricName, TableOf
from vitlens.uncertainty import Estimate

Size = tuple[int, int]  # height and width, px
Sweep = Literal["patch size", "image size"]
Cost = Literal["latency", "flops", "products"]


@dataclass(frozen=True)
class MachineRow:
    """The machine of the timings. threads: of torch on the CPU; arithmetic: fp32 or bf16; largest_batch: the largest of
    the batch sizes; longest: seconds of a pass beyond which no larger batch was tried (None: all of --batch-sizes
    were)."""

    name: str
    threads: int
    arithmetic: str
    largest_batch: int
    longest: float | None


@dataclass(frozen=True)
class ConventionRow:
    """How something is counted."""

    of: str
    says: str


@dataclass(frozen=True)
class CostRow:
    """The cost of one model, for one image of its own size (height, width).

    tokens: of its sequence, or the positions that its first block works on; one_sequence: whether it has one sequence
    of tokens throughout; by_formula: whether its counted FLOPs were checked against a formula; products: FLOPs of the
    products of attention, of all; crossover: the tokens from which these exceed those of projections and MLPs (None
    without one sequence or attention); training_bytes: stored by autograd; inference_bytes: the peak of activations.
    """

    model: str
    family: str
    untrained: bool
    size: Size
    tokens: int
    one_sequence: bool
    by_formula: bool
    parameters: int
    flops: int
    products: int
    crossover: float | None
    training_bytes: int
    inference_bytes: int


@dataclass(frozen=True)
class PartRow:
    """One part of one model: its parameters, and its FLOPs for one image."""

    model: str
    part: str
    parameters: int
    flops: int


@dataclass(frozen=True)
class PartMeaningRow:
    """The meaning of a part; all stages of CNNs are "stage"."""

    part: str
    meaning: str


@dataclass(frozen=True)
class SpeedRow:
    """Seconds of a pass of one model at one batch size: quartiles over repeats. images: the batch size;
    device_bytes: the peak of the device's memory, None on a CPU."""

    model: str
    low: float
    median: float
    high: float
    repeats: int
    images: int
    device_bytes: int | None

    @property
    def rate(self) -> float:
        """Images per second at the median."""
        return self.images / self.median


@dataclass(frozen=True)
class TokensRow:
    """The cost of one model at one number of tokens. sweep: what varied it; products: FLOPs of attention's products;
    low, median, high: seconds of a pass over so many images, as in SpeedRow."""

    model: str
    sweep: Sweep
    size: Size
    tokens: int
    flops: int
    products: int
    low: float
    median: float
    high: float
    repeats: int
    images: int


@dataclass(frozen=True)
class LeftOutSizeRow:
    """An image size at which one model does not run, and why."""

    model: str
    sweep: Sweep
    size: Size
    reason: str


@dataclass(frozen=True)
class ExponentRow:
    """The exponent of cost = c · tokens^k over n points, with Student's 95 % interval."""

    model: str
    sweep: Sweep
    cost: Cost
    value: float
    low: float | None
    high: float | None
    n: int
    tokens_from: int
    tokens_to: int

    @property
    def estimate(self) -> Estimate:
        """The exponent with its interval."""
        return Estimate(self.value, self.low, self.high, self.n, "")


@dataclass(frozen=True)
class SecondsArrays:
    """Seconds of every timed pass of one model, by batch size."""

    batch: Annotated[Mapping[int, NDArray[np.floating]], Form("f", (None,))]


MACHINE = TableOf("machine", MachineRow)
CONVENTIONS = TableOf("conventions", ConventionRow)
COSTS = TableOf("models", CostRow)
PARTS = TableOf("parts", PartRow)
MEANINGS = TableOf("meanings", PartMeaningRow)
SPEED = TableOf("speed", SpeedRow)
TOKENS = TableOf("tokens", TokensRow)
LEFT_OUT = TableOf("left_out", LeftOutSizeRow)
EXPONENTS = TableOf("exponents", ExponentRow)

SECONDS = ArraysOf("seconds-{model}", SecondsArrays)

PARAMETERS = MetricName("parameters/{model}")
FLOPS = MetricName("flops/{model}")
TRAINING_BYTES = MetricName("training_bytes/{model}")
INFERENCE_BYTES = MetricName("inference_bytes/{model}")
LATENCY = MetricName("latency/{model}/{batch}")
THROUGHPUT = MetricName("throughput/{model}/{batch}")
EXPONENT = MetricName("exponent/{model}/{sweep}/{cost}")
PROCESS_PEAK = MetricName("process_peak")  # bytes of the whole process, with all models

RECORD = Contents(
    metrics=(PARAMETERS, FLOPS, TRAINING_BYTES, INFERENCE_BYTES, LATENCY, THROUGHPUT, EXPONENT, PROCESS_PEAK),
    tables=(MACHINE, CONVENTIONS, COSTS, PARTS, MEANINGS, SPEED, TOKENS, LEFT_OUT, EXPONENTS),
    arrays=(SECONDS,),
)


def in_pixels(size: Size) -> str:
    """Height and width: "32x48"."""
    height, width = size
    return f"{height}x{width}"
