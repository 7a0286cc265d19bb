"""Earlier names of fields and methods of results: they work and warn."""

import warnings
from typing import Any


class RenamedAttribute:
    """An attribute under its earlier name: reading it warns and returns the attribute `name`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.earlier = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.earlier = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warnings.warn(
            f"{type(instance).__name__}.{self.earlier} is now {self.name}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(instance, self.name)
