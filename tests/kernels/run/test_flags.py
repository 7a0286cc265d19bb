"""Options of an earlier run are typed again so that they are parsed to the same values."""

import json
import shlex
from dataclasses import asdict

import pytest

from vitlens.commands.profile.options import ProfileOptions
from vitlens.commands.run.flags import flags_of, typed, typed_again
from vitlens.commands.run.options import ModelOptions


@pytest.mark.parametrize(
    "options",
    [
        ProfileOptions(("vit-tiny",), patch_sizes=((4, 8), (8, 8))),
        ProfileOptions(("vit-tiny",), sizes=((32, 48),)),
        ModelOptions(mean=(0.48145466, 0.4578275, 0.40821073)),
        ModelOptions(image_size=(224, 160)),
    ],
)
def test_typed_values_are_parsed_to_the_options_also_from_json(options):
    words = list(typed(options))
    saved = json.loads(json.dumps(asdict(options), default=str))
    assert list(typed_again(type(options), saved)) == words
    parsers = {}
    for field, _, flag in flags_of(type(options)):
        if flag is not None and flag.parse is not None:
            parsers[flag.name] = (field.name, flag.parse)
    *_, name, text = shlex.split(" ".join(words))
    field_name, parse = parsers[name]
    assert parse(name, text) == getattr(options, field_name)
