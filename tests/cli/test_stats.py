"""What is typed after `vitlens stats` is what the run gets."""

from vitlens.cli.main import run


def test_over_training_and_its_film_arrive(stand_in):
    calls = stand_in("stats")
    assert run(["stats", "runs/a", "--over-training", "--animate", "mp4"]) == 0
    assert run(["stats", "runs/a"]) == 0
    [(args, asked), (_, default)] = calls
    assert args == (["runs/a"],)
    assert (asked["learning"], asked["animate"]) == (True, "mp4")
    assert (default["learning"], default["animate"]) == (False, None)
    assert run(["stats", "runs/a", "--animate", "avi"]) == 2
