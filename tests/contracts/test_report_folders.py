"""Every command leaves a complete folder, and `report` writes the same one again."""

import shutil
from pathlib import Path

import pytest

from tests.kit.golden import LINES, SAVED_TWICE
from tests.kit.marks import slow_among
from tests.kit.whole_folder import whole_folder
from vitlens.commands.registry import COMMANDS

# tests/ui/demo has the others
MADE = {word for word, command in COMMANDS.items() if command.reports and not command.serves}
# and a command that was added
NAMES = [
    *LINES,
    *sorted(MADE - {line.split()[0] for line in LINES.values()}),
]

# long ones that no test of the default suite asks for, and whose parts it makes by hand
BY_HAND = (
    "compare of one family",
    "profile by patch size",
    "attention of a patch",
    "every method",
    "explain by every method",
    "stats of pictures",
    "attack of predictions",
    "train a head alone",
    "features of pictures",
    "study along an axis",
)


@pytest.mark.parametrize("name", slow_among(NAMES, BY_HAND))
def test_a_command_leaves_a_whole_folder_that_can_be_made_again(name, golden, tmp_path):
    original = golden(name)
    copy = Path(shutil.copytree(original.folder, tmp_path / "run"))
    whole_folder(copy, original.record.command, saved=name in SAVED_TWICE)
