"""What `vitlens profile` records: parameters, FLOPs of one image, memory, latency, and growth with tokens."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from vitlens.record import OfModel, Record, col, table
from vitlens.uncertainty import Estimate

Size: TypeAlias = tuple[int, int]
Sweep: TypeAlias = Literal["patch-size", "image-size"]
Cost: TypeAlias = Literal["latency", "flops", "products"]


@dataclass(frozen=True)
class MachineRow:
    """The machine of the timings. threads: of torch on the CPU; arithmetic: fp32 or bf16; longest: seconds of a pass
    beyond which no larger batch was tried, None with --batch-sizes."""

    name: str = col("machine")
    threads: int = col("threads")
    arithmetic: str = col("arithmetic")
    longest: float | None = col("longest pass", unit="s", default=None)
    peak: int | None = col("peak memory of the process", unit="bytes", metric="process_peak", default=None)


@dataclass(frozen=True)
class CostRow(OfModel):
    """One model, for one image of its own size (height, width). tokens: of its sequence, or the positions on which its
    first block works; one_sequence: whether it has one throughout; by_formula: whether a formula gives the same FLOPs;
    products: FLOPs of attention's products; crossover: the tokens from which these exceed those of projections and
    MLPs, None without one sequence or attention."""

    family: str = col("family")
    untrained: bool = col("untrained")
    size: Size = col("image (px)")
    tokens: int = col("tokens", term="of the sequence; in windowed models and CNNs the positions of the first block")
    one_sequence: bool = col("one sequence")
    by_formula: bool = col("checked by formula")
    parameters: int = col("parameters", metric="parameters/{model}")
    flops: int = col(
        "FLOPs of one image",
        unit="FLOPs",
        term="operations of matrix products and convolutions, 2 for a multiplication with its addition",
        metric="flops/{model}",
    )
    products: int = col("FLOPs of attention products", unit="FLOPs")
    training_bytes: int = col(
        "stored for a backward pass, one image",
        unit="bytes",
        term="what autograd keeps from a forward pass, without parameters, gradients and the optimiser's state",
        metric="training_bytes/{model}",
    )
    inference_bytes: int = col(
        "peak of activations, one image",
        unit="bytes",
        term="the most that the tensors of a forward pass without gradients take at one time",
        metric="inference_bytes/{model}",
    )
    crossover: float | None = col("tokens from which products dominate", default=None)


@dataclass(frozen=True)
class PartRow(OfModel):
    """One part of one model, and its shares of the model's own."""

    part: str = col("part")
    meaning: str = col("what it is")
    parameters: int = col("parameters")
    flops: int = col("FLOPs", unit="FLOPs")
    of_parameters: float | None = col("share of parameters", unit="fraction", default=None)
    of_flops: float | None = col("share of FLOPs", unit="fraction", default=None)


@dataclass(frozen=True)
class SpeedRow(OfModel):
    """One model at one batch size, medians over passes. spread: the upper quartile of their times by the lower;
    device_bytes: the peak of the device's memory, None on a CPU."""

    images: int = col("batch size")
    latency: Estimate = col("latency of a pass", metric="latency/{model}/{images}", better="lower")
    rate: Estimate = col("throughput", metric="throughput/{model}/{images}", better="higher")
    spread: float = col("upper by lower quartile", term="of the times of the passes; above 1.5: disturbed")
    device_bytes: int | None = col("peak of the device", unit="bytes", default=None)


@dataclass(frozen=True)
class TokensRow(OfModel):
    """One model at one number of tokens. sweep: what varied it; latency: of a pass over so many images."""

    sweep: Sweep = col("varied")
    size: Size = col("image (px)")
    tokens: int = col("tokens")
    flops: int = col("FLOPs", unit="FLOPs")
    products: int = col("of attention products", unit="FLOPs")
    images: int = col("images")
    latency: Estimate = col("latency")


@dataclass(frozen=True)
class LeftOutSizeRow(OfModel):
    """An image size at which a model does not run, and why."""

    sweep: Sweep = col("varied")
    size: Size = col("image (px)")
    reason: str = col("reason")


@dataclass(frozen=True)
class ExponentRow(OfModel):
    """The exponent of cost = c · tokens^k over n points, with Student's 95 % interval."""

    sweep: Sweep = col("varied")
    cost: Cost = col("cost")
    exponent: Estimate = col(
        "exponent", term="k of cost = c · tokens^k over the range given", metric="exponent/{model}/{sweep}/{cost}"
    )
    tokens_from: int = col("from (tokens)")
    tokens_to: int = col("to (tokens)")

    @property
    def varied(self) -> tuple[Cost, Sweep]:
        """Return which cost, by what the number of tokens was varied."""
        return self.cost, self.sweep


@dataclass(frozen=True, kw_only=True)
class ProfileRecord(Record):
    """The cost of models."""

    machine: tuple[MachineRow, ...] = table()
    costs: tuple[CostRow, ...] = table()
    parts: tuple[PartRow, ...] = table()
    speed: tuple[SpeedRow, ...] = table()
    tokens: tuple[TokensRow, ...] = table()
    left_out: tuple[LeftOutSizeRow, ...] = table()
    exponents: tuple[ExponentRow, ...] = table()
