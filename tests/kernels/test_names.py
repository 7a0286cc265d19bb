from vitlens.names import are_imagenet, imagenet_classes, imagenet_indices


def test_a_class_index_is_the_rank_of_its_wnid():
    wnids = list(imagenet_indices())
    assert wnids == sorted(wnids)
    assert list(imagenet_indices().values()) == list(range(1000))


def test_names_are_a_thousand_different_ones():
    assert len(set(imagenet_classes())) == 1000
    assert all(name == name.strip() and name for name in imagenet_classes())


def test_names_are_those_that_torchvision_ships():
    from torchvision.models import ResNet50_Weights

    theirs = ResNet50_Weights.IMAGENET1K_V2.meta["categories"]
    same = sum(ours == name for ours, name in zip(imagenet_classes(), theirs))
    assert same > 950  # a shift by one would leave next to none


def test_only_folders_that_are_all_wnids_are_imagenet():
    assert are_imagenet(["n01440764", "n02012849"])
    assert not are_imagenet(["n01440764", "cat"])
    assert not are_imagenet([])
