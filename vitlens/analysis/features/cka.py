"""Linear CKA from running sums: equal to that of all images at once for any batches, in memory independent of n.

Centred kernel alignment (Kornblith 2019) is HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)). The unbiased estimator of HSIC
(Song 2012, equation 5) of the Gram matrices K = X X' and L = Y Y', their diagonals set to 0, is

    [ tr(K L) + 1'K1 1'L1 / ((n - 1)(n - 2)) - 2/(n - 2) 1'K L 1 ] / (n (n - 3)).

Minibatch CKA (Nguyen 2021) averages this estimator over batches, which is noisier and depends on the batches. No Gram
matrix is needed: with a_i = |x_i|^2, b_i = |y_i|^2, s = sum x_i, t = sum y_i and C = X'Y,

    tr(K L) = |C|^2 - sum a_i b_i                                     (all pairs of images, less the diagonal)
    1'K1    = |s|^2 - sum a_i
    1'K L 1 = sum (x_i.s - a_i)(y_i.t - b_i) = s'C t - s.(sum b_i x_i) - t.(sum a_i y_i) + sum a_i b_i

so C, s, t, sum b_i x_i, sum a_i y_i, sum a_i, sum b_i and sum a_i b_i are sufficient. All are sums over images, exact
up to rounding in float64. The estimator does not change when a constant is added to all rows, so the mean of the first
batch is subtracted, to avoid cancellation where means are large. The biased estimator is |C - s t' / n|^2 / (n - 1)^2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from vitlens.errors import InputError

Layers = Sequence[Tensor]  # by layer (batch, dim), of any widths
Matrix = Float[Tensor, "layers others"]
FEWEST = 4  # images: with fewer the unbiased estimator is not defined


@dataclass(frozen=True)
class Sums:
    """The sums over n images of a pair of layers X (n, dim) and Y (n, other), float64; see the module's notation.

    product: C; x: s; y: t; x_b: sum b_i x_i; y_a: sum a_i y_i; a, b, ab: of the squared lengths.
    """

    n: Tensor
    product: Float[Tensor, "dim other"]
    x: Float[Tensor, " dim"]
    y: Float[Tensor, " other"]
    x_b: Float[Tensor, " dim"]
    y_a: Float[Tensor, " other"]
    a: Float[Tensor, ""]
    b: Float[Tensor, ""]
    ab: Float[Tensor, ""]

    @classmethod
    def of(cls, x: Float[Tensor, "batch dim"], y: Float[Tensor, "batch other"]) -> "Sums":
        """The sums over one batch."""
        a, b = x.square().sum(1), y.square().sum(1)
        return cls(torch.tensor(len(x)), x.T @ y, x.sum(0), y.sum(0), b @ x, a @ y, a.sum(), b.sum(), a @ b)

    def plus(self, other: "Sums", *, sign: int = 1) -> "Sums":
        """The sums over the images of both; sign -1: over this one's images without the other's."""
        return Sums(*(getattr(self, part.name) + sign * getattr(other, part.name) for part in fields(self)))

    def hsic(self, *, biased: bool = False) -> float:
        """HSIC with linear kernels."""
        n, s, t = int(self.n), self.x, self.y
        if biased:
            return float((self.product - torch.outer(s, t) / n).square().sum() / (n - 1) ** 2)
        trace = self.product.square().sum() - self.ab
        ends = (s @ s - self.a) * (t @ t - self.b) / ((n - 1) * (n - 2))
        chain = s @ self.product @ t - s @ self.x_b - t @ self.y_a + self.ab
        return float((trace + ends - 2 / (n - 2) * chain) / (n * (n - 3)))


class CKAStream:
    """Accumulates the features of two sets of layers batch by batch, and computes the CKA of every pair of layers.

    centres: subtracted from each layer of the first set and of the second (None: the mean of the first batch).
    Memory: one product of widths for every pair of layers.
    """

    def __init__(self, centres: tuple[Layers, Layers] | None = None) -> None:
        self.centres = centres
        self.sums: dict[tuple[str, int, int], Sums] = {}

    @property
    def images(self) -> int:
        """The number of images added."""
        return int(next(iter(self.sums.values())).n) if self.sums else 0

    def add(self, first: Layers, second: Layers | None = None) -> None:
        """Add a batch: the same images (batch, dim) for each layer; None: the first set with itself.

        Raises InputError for numbers of images or layers that do not agree.
        """
        same, other = second is None, first if second is None else second
        counts = [len(part) for part in (*first, *(second or ()))]
        if len(set(counts)) != 1:
            raise InputError(f"expected the same images of all layers, found {counts}")
        if self.centres is None:
            self.centres = ([part.double().mean(0) for part in first], [part.double().mean(0) for part in other])
        if (len(first), len(other)) != (len(self.centres[0]), len(self.centres[1])):
            raise InputError(f"expected {len(self.centres[0])} and {len(self.centres[1])} layers, as before")
        first_centred = [part.double() - centre for part, centre in zip(first, self.centres[0])]
        second_centred = (
            first_centred if same else [part.double() - centre for part, centre in zip(other, self.centres[1])]
        )
        for i, x in enumerate(first_centred):
            self._take(("first", i, i), x, x)
            for j in range(i if same else 0, len(second_centred)):
                self._take(("cross", i, j), x, second_centred[j])
        for j, y in enumerate([] if same else second_centred):
            self._take(("second", j, j), y, y)

    def without(self, other: "CKAStream") -> "CKAStream":
        """The stream of this one's images without another's, which must have the same centres."""
        remaining = CKAStream(self.centres)
        remaining.sums = {key: sums.plus(other.sums[key], sign=-1) for key, sums in self.sums.items()}
        return remaining

    def cka(self, *, biased: bool = False) -> Matrix:
        """CKA (layers, others), float64; NaN for a layer that does not vary. Raises InputError below 4 images."""
        if self.images < FEWEST:
            raise InputError(f"expected at least {FEWEST} images for CKA, found {self.images}; give more")
        same = not any(kind == "second" for kind, _, _ in self.sums)
        hsic = {key: sums.hsic(biased=biased) for key, sums in self.sums.items()}
        rows = max(i for kind, i, _ in hsic if kind == "cross") + 1
        columns = max(j for kind, _, j in hsic if kind == "cross") + 1
        matrix = torch.full((rows, columns), torch.nan, dtype=torch.float64)
        for i in range(rows):
            for j in range(columns):
                shared = hsic["cross", min(i, j), max(i, j)] if same else hsic["cross", i, j]
                own, others = hsic["first", i, i], hsic["first" if same else "second", j, j]
                if own > 0 and others > 0:
                    matrix[i, j] = shared / (own**0.5 * others**0.5)
        return matrix

    def _take(self, key: tuple[str, int, int], x: Tensor, y: Tensor) -> None:
        batch = Sums.of(x, y)
        self.sums[key] = self.sums[key].plus(batch) if key in self.sums else batch
