from vitlens.names import are_imagenet, imagenet_classes, imagenet_indices


def test_the_thousand_classes_are_different_in_order_of_wnid_and_as_torchvision_ships_them():
    from torchvision.models import ResNet50_Weights

    wnids, names = list(imagenet_indices()), imagenet_classes()
    assert wnids == sorted(wnids)
    assert list(imagenet_indices().values()) == list(range(1000))
    assert len(set(names)) == 1000
    theirs = ResNet50_Weights.IMAGENET1K_V2.meta["categories"]
    assert sum(ours == name for ours, name in zip(names, theirs)) > 950  # a shift by one would leave next to none
    assert are_imagenet(wnids[:2])
    assert not are_imagenet(["n01440764", "cat"])
    assert not are_imagenet([])
