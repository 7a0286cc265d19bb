"""The bins of the reliability diagram."""

import torch

from vitlens.analysis.evaluation.evaluate import sources_by_bin


def test_bins_count_sources_where_several_images_show_one():
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
    labels = torch.tensor([0, 0, 1, 0, 1])
    together = sources_by_bin(probabilities, labels, torch.tensor([4, 4, 7, 4, 7]))
    apart = sources_by_bin(probabilities, labels, None)
    assert together[together > 0].tolist() == [2, 2]
    assert apart[apart > 0].tolist() == [2, 3]
