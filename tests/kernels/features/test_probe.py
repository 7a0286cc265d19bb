"""The choice of the training images that are held out."""

import torch

from vitlens.analysis.features.probe import held_out_mask


def test_a_group_is_held_out_whole_also_with_images_of_several_classes():
    groups = torch.cat((torch.arange(10), torch.arange(5, 10)))
    labels = torch.tensor([0] * 10 + [1] * 5)
    for seed in range(20):
        is_held_out = held_out_mask(labels, groups=groups, seed=seed)
        held_out = groups[is_held_out].unique()
        assert not torch.isin(groups[~is_held_out], held_out).any()
        assert labels[is_held_out].unique().tolist() == [0, 1]
        assert labels[~is_held_out].unique().tolist() == [0, 1]


def test_the_last_image_of_a_class_stays_in_the_fit():
    groups = torch.tensor([0, 0, 1, 2, 3])
    labels = torch.tensor([0, 1, 0, 0, 0])
    for seed in range(20):
        is_held_out = held_out_mask(labels, groups=groups, seed=seed)
        assert not is_held_out[1]
        assert int(is_held_out.sum()) == 1
