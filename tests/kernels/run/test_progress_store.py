"""Partial results are recalled as they were kept, refused for other inputs, and gone once a run has ended."""

import numpy as np
import pytest

from vitlens.arrays import Form
from vitlens.commands.run.progress import ProgressStore
from vitlens.errors import InputError

FORMS = {"loss": Form("f", (2, 3)), "cost": Form("iu")}
ARRAYS = {"loss": np.arange(6.0).reshape(2, 3), "cost": np.array(7)}


def test_what_was_kept_is_recalled_by_its_key_and_process(tmp_path):
    store = ProgressStore(tmp_path / "progress")
    assert store.recall("pgd-0", "digest", FORMS) is None
    store.remember("pgd-0", "digest", ARRAYS)
    recalled = store.recall("pgd-0", "digest", FORMS)
    assert recalled is not None
    assert all((recalled[name] == array).all() for name, array in ARRAYS.items())
    assert store.recall("pgd-1", "digest", FORMS) is None
    assert ProgressStore(tmp_path / "progress", process=1).recall("pgd-0", "digest", FORMS) is None


def test_other_inputs_and_other_forms_are_refused(tmp_path):
    store = ProgressStore(tmp_path / "progress")
    store.remember("pgd-0", "digest", ARRAYS)
    with pytest.raises(InputError, match="found others"):
        store.recall("pgd-0", "another", FORMS)
    with pytest.raises(InputError, match=r"'loss' of shape \(2, 4\)"):
        store.recall("pgd-0", "digest", FORMS | {"loss": Form("f", (2, 4))})


def test_a_finished_run_leaves_nothing_but_what_is_not_its_own(tmp_path):
    nowhere, store = ProgressStore(None), ProgressStore(tmp_path / "progress")
    nowhere.remember("pgd-0", "digest", ARRAYS)
    assert nowhere.recall("pgd-0", "digest", FORMS) is None
    for left in ([], ["notes.txt"]):
        store.remember("pgd-0", "digest", ARRAYS)
        for name in left:
            (tmp_path / "progress" / name).touch()
        store.forget()
        assert [path.name for path in (tmp_path / "progress").glob("*")] == left
