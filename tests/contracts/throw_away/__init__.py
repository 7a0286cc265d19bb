"""A command that the tests add: a folder of four files and one entry of the registry."""

from vitlens.commands.registry import Command

WORD = "brightness"
ENTRY = Command(
    WORD,
    "How bright the images are: a throw-away command of the tests.",
    "vitlens brightness vit-digits --limit 3",
    "Inspect",
    needs=("maps",),
    package="tests.contracts.throw_away",
)
