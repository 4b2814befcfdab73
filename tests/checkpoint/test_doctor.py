import os

import pytest

from heal import doctor
from heal.cli import main
from tests.checkpoint.scenes import saved_at


def levels(found):
    return [finding.level for finding in found]


def test_a_healthy_folder_gets_a_clean_bill(tmp_path, capsys):
    saved_at(tmp_path, 1, 3)
    assert main(["doctor", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "step-000003: every byte is what was saved" in said
    assert "a run resumes from step 3" in said


def test_damage_is_named_with_what_to_do_and_what_resuming_will_use(tmp_path, capsys):
    saved_at(tmp_path, 1, 3)
    shard = tmp_path / "step-000003" / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert main(["doctor", str(tmp_path)]) == 2
    said = capsys.readouterr().out
    assert "ERROR step-000003 is damaged" in said
    assert "rank-00000.safetensors: tensor" in said
    assert "bring it back from a copy" in said
    assert "a run resumes from step 1" in said
    assert main(["doctor", "--quick", str(tmp_path)]) == 0, "tensors are not read"


def test_a_folder_without_a_whole_checkpoint_is_an_error(tmp_path):
    assert levels(doctor.check_checkpoints(tmp_path / "none")) == ["error"]
    assert "error" in levels(doctor.check_checkpoints(tmp_path))
    saved_at(tmp_path, 1)
    (tmp_path / "step-000001" / "manifest-00000.json").write_bytes(b"{}")
    told = [f.what for f in doctor.check_checkpoints(tmp_path)]
    assert "no checkpoint is whole" in told


def test_leftovers_links_and_open_doors_are_warned_of(tmp_path):
    saved_at(tmp_path, 1)
    (tmp_path / "step-000002").mkdir()
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / "failed-00004").write_text("")
    (tmp_path / "step-000009").symlink_to(tmp_path / "step-000001")
    (tmp_path / "step-000005.abandoned").mkdir()
    os.chmod(tmp_path, 0o777)
    found = doctor.check_checkpoints(tmp_path)
    told = "\n".join(f"{f.level} {f.what}" for f in found)
    assert "warn step-000002 is not finished: a crash" in told
    assert "warn step-000003 is not finished: rank 4 failed" in told
    assert "warn step-000009 is a link" in told
    assert "ok 1 checkpoints were abandoned" in told
    assert "warn any user may write" in told
    assert all(f.todo for f in found if f.level != "ok")
    assert main(["doctor", str(tmp_path)]) == 1


@pytest.mark.parametrize(("share", "level"), [(0.5, "error"), (1.5, "warn"), (3, "ok")])
def test_a_disk_that_fills_up_is_seen_coming(tmp_path, monkeypatch, share, level):
    saved_at(tmp_path, 1)
    size = sum(p.stat().st_size for p in (tmp_path / "step-000001").iterdir())
    monkeypatch.setattr(doctor, "free_bytes", lambda path: int(share * size))
    assert levels(doctor.check_space(tmp_path)) == [level]


def test_settings_and_the_cluster_are_looked_at_too(tmp_path, capsys):
    (tmp_path / "heal.toml").write_text("lr_factor = 7\n")
    assert main(["doctor", "--config", str(tmp_path / "heal.toml")]) == 2
    assert "got 7" in capsys.readouterr().out
    main(["doctor", "--cluster"])
    assert "gloo" in capsys.readouterr().out


def test_nothing_to_look_at_is_an_error(capsys):
    assert main(["doctor"]) == 2
    assert "expected a folder of checkpoints" in capsys.readouterr().err
