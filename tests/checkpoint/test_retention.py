import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heal.checkpoint import CheckpointStore
from heal.checkpoint.files import StepFolder, list_folders, retain, surplus
from tests.checkpoint.scenes import run, saved_at


def steps(directory):
    return [folder.step for folder in list_folders(directory)]


def test_so_many_are_kept(tmp_path):
    there = run()
    for step in range(1, 6):
        there.train(1).save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [4, 5]


@given(
    st.sets(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 5), st.data()
)  # fmt: skip
def test_the_newest_verified_is_never_among_those_that_go(found, keep, data):
    folders = [StepFolder(step) for step in found]
    verified = data.draw(st.sampled_from(folders))
    going = surplus(folders, keep, verified)
    assert verified not in going
    assert all(folder < verified for folder in going)
    assert len(folders) - len(going) >= min(keep, len(folders))


def test_what_nobody_verified_pushes_nothing_out(tmp_path):
    saved_at(tmp_path, 1, 2, 3, 4)
    verified = list_folders(tmp_path)[1]
    retain(tmp_path, 1, verified, print)
    assert steps(tmp_path) == [2, 3, 4]


def test_without_reading_back_nothing_is_removed(tmp_path):
    there = run().train(1)
    from heal.checkpoint.store import training_state

    store = CheckpointStore(tmp_path, keep=1, read_back=False)
    state = training_state(there.model, there.optimizer, there.scheduler, None)
    for step in (1, 2, 3):
        store.save_state(step, state, {})
    assert store.steps() == [3, 2, 1]


def test_what_crashes_left_goes_but_not_what_is_newer(tmp_path):
    saved_at(tmp_path, 2)
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / "step-000009").mkdir()
    retain(tmp_path, 1, list_folders(tmp_path)[1], print)
    assert steps(tmp_path) == [2, 9]


def test_files_of_others_are_left_alone_and_told(tmp_path):
    saved_at(tmp_path, 1, 2)
    (tmp_path / "step-000001" / "notes.txt").write_text("mine")
    (tmp_path / "other").mkdir()
    notes = []
    retain(tmp_path, 1, list_folders(tmp_path)[1], notes.append)
    assert os.listdir(tmp_path / "step-000001") == ["notes.txt"]
    assert "cannot remove" in notes[0]
    assert (tmp_path / "other").is_dir()


def test_a_link_to_elsewhere_is_not_followed(tmp_path):
    store = tmp_path / "store"
    saved_at(store, 2)
    precious = tmp_path / "precious"
    saved_at(precious, 1)
    (store / "step-000001").symlink_to(precious / "step-000001")
    retain(store, 1, list_folders(store)[-1], print)
    assert Path(precious / "step-000001" / "COMMIT").exists()


def test_abandoned_checkpoints_do_not_pile_up(tmp_path):
    there = run()
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 4):
        there.train(1).save(tmp_path, step, keep=9)
    store.abandon_after(1)
    there.save(tmp_path, 5, keep=1)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step-000004.abandoned", "step-000005"]


def test_at_least_one_has_to_be_kept(tmp_path):
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        CheckpointStore(tmp_path, keep=0)
