"""Factors: the numbers from which drawn images were generated, one row per image."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitlens.errors import DataError
from vitlens.summary import Line, Table

Column = NDArray[np.generic]

_MOST_LISTED: Final = 4  # columns in an error


class Factors(Table, Mapping[str, Column]):
    """The generating factors of n images: an immutable mapping from a name to an array (n,).

    Analyses never read them. They are used afterwards, to judge what an analysis has recovered.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            listed = [f"{name} {len(column)}" for name, column in columns.items()]
            raise DataError(
                "expected factors with one row per image, found columns of different lengths: "
                f"{', '.join(listed[:_MOST_LISTED])}"
            )
        copies = {}
        for name, column in columns.items():
            copies[name] = np.array(column)
            copies[name].setflags(write=False)
        self._columns = MappingProxyType(copies)

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._columns)

    def __reduce__(self) -> tuple[type["Factors"], tuple[dict[str, Column]]]:
        """Return what a pickle needs: a MappingProxyType cannot be pickled."""
        return type(self), (dict(self._columns),)

    @property
    def rows(self) -> int:
        """Return the number of images."""
        if not self._columns:
            return 0
        first_column = next(iter(self._columns.values()))  # all columns have one length
        return len(first_column)

    def pick(self, indices: Tensor) -> "Factors":
        """Return the factors of these images, in this order."""
        chosen = indices.cpu().numpy()
        return Factors({name: column[chosen] for name, column in self._columns.items()})

    def records(self) -> Iterator[Mapping[str, object]]:
        """Yield the row of each image."""
        columns = {name: column.tolist() for name, column in self._columns.items()}
        for index in range(self.rows):
            yield {name: values[index] for name, values in columns.items()}

    def summary(self) -> Iterator[Line]:
        """Yield the range of each factor."""
        for name, column in self._columns.items():
            yield Line(name, column)
