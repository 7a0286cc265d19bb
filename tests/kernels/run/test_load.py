"""More images than there are digits: several scenes of each, the first round whole."""

import torch

from tests.kit.making import digits
from vitlens import load
from vitlens.commands.run.load import load_split, scenes_of_digits
from vitlens.commands.run.options import RunOptions


def test_of_more_scenes_than_digits_the_first_are_those_of_a_smaller_run_and_all_differ():
    count, once = 950, digits("test", seed=3)
    split = scenes_of_digits(count, seed=3)
    assert len(split) == len(split.labels) == len(split.masks) == count
    times = torch.bincount(split.groups)
    assert (times[once.groups].min(), times.max()) == (2, 3)
    assert torch.equal(split.groups[:450], once.groups)
    assert torch.equal(split.source.read(torch.arange(450)), once.source.read(torch.arange(450)))
    last = split.labels[900:].bincount()
    assert last.max() - last.min() <= 1
    assert len(split.source.read(torch.arange(450, count)).flatten(1).unique(dim=0)) == count - 450
    assert "in 2 to 3 scenes" in split.notes[-1]


def test_as_many_as_there_are_is_one_scene_each_and_only_who_asks_gets_more(tiny_vit):
    split, expected = scenes_of_digits(450, seed=1), digits("test", seed=1).limit(450, seed=1)
    assert torch.equal(split.groups, expected.groups)
    assert not split.notes
    model, options = load(str(tiny_vit)), RunOptions(device="cpu", quiet=True, limit=460)
    assert [len(load_split(model, options=options, repeat=repeat)) for repeat in (False, True)] == [450, 460]
