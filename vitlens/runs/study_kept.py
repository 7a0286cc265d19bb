"""The options that a resumed study takes from its beginning."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from vitlens.commands.scaffold.options import RunOptions
from vitlens.names import Precision
from vitlens.schema import Between, Text


@dataclass(frozen=True)
class KeptOptions:
    """The options that a resumed run takes from its beginning, as config.json says them."""

    seed: Annotated[int, Between(0, 2**63 - 1)]
    limit: Annotated[int, Between(1, 2**53)] | None
    batch_size: Annotated[int, Between(1, 2**31)] | None
    precision: Precision
    data_dir: Text

    def given_to(self, options: RunOptions) -> RunOptions:
        """Other options with these in their place."""
        return replace(options, **{**vars(self), "data_dir": Path(self.data_dir)})
