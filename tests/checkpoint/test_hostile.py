"""Checkpoints made to do harm, with all checksums right: refused, and the file is named."""

import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from heal.checkpoint import CheckpointCorrupt, CheckpointRefused
from heal.checkpoint.files import list_folders
from heal.checkpoint.manifest import digest
from heal.checkpoint.reading import CheckpointReader
from tests.checkpoint.scenes import saved_at

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    saved_at(tmp_path, 1)
    return tmp_path / "step-000001"


def sign(folder, manifest: bytes | None = None, **changes):
    """Put a manifest in and make COMMIT vouch for it, as who wrote the format could."""
    path = folder / "manifest-00000.json"
    if manifest is not None:
        path.write_bytes(manifest)
    commit = json.loads((folder / "COMMIT").read_text().splitlines()[0])
    commit["manifests"] = {"manifest-00000.json": digest(path.read_bytes())}
    line = json.dumps({**commit, **changes}, separators=(",", ":")).encode()
    (folder / "COMMIT").write_bytes(line + b"\n" + digest(line).encode() + b"\n")


def changed(folder, change):
    page = json.loads((folder / "manifest-00000.json").read_text())
    change(page)
    sign(folder, json.dumps(page, separators=(",", ":")).encode())


def first_tensor(change):
    def apply(page):
        name = next(n for n in page["tensors"] if n.startswith("parameter/"))
        entry = page["tensors"][name]
        change(page["tensors"], name, entry)

    return apply


def put(index, value):
    return first_tensor(lambda tensors, name, entry: entry.__setitem__(index, value))


def renamed(to):
    return first_tensor(lambda tensors, name, entry: tensors.__setitem__(to, tensors.pop(name)))


MANIFESTS = {
    "path-traversal": (lambda p: p.update(file="../../etc/passwd"), "got '../../etc/passwd'"),
    "absolute-path": (lambda p: p.update(file="/etc/passwd"), "got '/etc/passwd'"),
    "nul-in-path": (lambda p: p.update(file="rank-00000.safetensors\0"), "file: expected "),
    "nul-in-name": (renamed("parameter/a\0b"), "expected a name such as"),
    "strange-name": (renamed("__metadata__"), "expected a name such as"),
    "absurd-size": (put(2, [2**47, 2**47]), "elements, got ["),
    "hidden-size": (put(2, [0, 2**47, 2**47]), "elements, got [0, "),
    "huge-size": (put(2, [2**40]), "expected"),
    "negative-size": (put(2, [-1]), "expected a shape, got"),
    "float-size": (put(2, [1.0]), "expected a shape, got"),
    "true-size": (put(2, [True]), "expected a shape, got"),
    "many-dimensions": (put(2, [1] * 65), "expected a shape, got"),
    "unknown-dtype": (put(1, "object"), "expected a dtype, got 'object'"),
    "list-dtype": (put(1, ["float32"]), "expected a dtype"),
    "rank-outside": (put(0, 7), "expected a rank under 1, got 7"),
    "negative-rank": (put(0, -1), "got -1"),
    "negative-offset": (put(6, -8), "got -8"),
    "overlapping-offset": (put(6, 4), "expected byte 0, got 4"),
    "part-of-nothing": (put(4, [0]), "start of a part, got [None, [0]]"),
    "part-outside": (
        first_tensor(lambda t, n, e: e.__setitem__(slice(3, 5), [[1, 1], [0, 0]])),
        "expected a part within",
    ),
    "bad-checksum": (put(5, "xyz"), "checksum of tensor"),
    "short-entry": (first_tensor(lambda t, n, e: e.pop()), "expected a list of seven"),
    "tensors-a-list": (lambda p: p.update(tensors=[]), "tensors: expected an object, got []"),
    "another-step": (lambda p: p.update(step=2), "step: expected 1, got 2"),
    "step-true": (lambda p: p.update(step=True), "step: expected 1, got True"),
    "another-rank": (lambda p: p.update(rank=1), "rank: expected 0, got 1"),
    "another-format": (lambda p: p.update(format="pickle"), "got 'pickle'"),
    "the-future": (lambda p: p.update(version=2), "version: expected 1, got 2"),
    "missing-field": (lambda p: p.pop("values"), "values is missing"),
    "unknown-type": (lambda p: p.update(values={"$": "os.system"}), "'os.system' is no type"),
    "missing-tensor": (
        lambda p: p.update(values={"$": "tensor", "name": "value/77"}),
        "'value/77' is not there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest_is_refused_by_name(folder, name):
    change, why = MANIFESTS[name]
    changed(folder, change)
    with pytest.raises(CheckpointCorrupt) as error:
        CheckpointReader(folder).read(0, 1)
    assert why in str(error.value)
    assert str(folder) in str(error.value)


RAW = {
    "duplicate-keys": (
        b'{"format":"heal-checkpoint","format":"x"}',
        "not JSON as it is written here",
    ),
    "huge-int": (b'{"step":' + b"9" * 100_000 + b"}", "not JSON"),
    "deep-nesting": (b'{"values":' + b"[" * 200_000, "nested beyond reason"),
    "deep-objects": (b'{"a":' * 200_000, "nested beyond reason"),
    "no-object": (b"[]", "expected an object"),
    "pickle": (pickle.dumps(os.system), "not JSON"),
    "infinity": (b'{"step":Infinity}', "not JSON"),
    "empty": (b"", "not JSON"),
}


@pytest.mark.parametrize("name", RAW)
def test_a_manifest_that_is_no_json_of_ours_is_refused_by_name(folder, name):
    data, why = RAW[name]
    sign(folder, data)
    with pytest.raises(CheckpointRefused, match=why) as error:
        CheckpointReader(folder).read(0, 1)
    assert "manifest-00000.json" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"manifests": {"../manifest-00000.json": "0" * 64}},
            r"expected one of each of 1 ranks, got '\.\./manifest",
        ),
        ({"manifests": {}}, "not all of 1"),
        ({"manifests": {"manifest-00000.json": "0"}}, "checksum of manifest"),
        ({"world_size": 10**9}, "world_size: expected"),
        ({"world_size": 0}, "world_size: expected"),
        ({"world_size": "1"}, "world_size: expected"),
        ({"step": -1}, "step: expected"),
        ({"step": 1.0}, "step: expected"),
        ({"save_id": "../x"}, "save_id: expected"),
    ],
    ids=str,
)
def test_a_hostile_commit_is_refused_by_name(folder, changes, why):
    sign(folder, **changes)
    with pytest.raises(CheckpointRefused, match=why):
        CheckpointReader(folder)


@pytest.mark.parametrize("name", ["COMMIT", "manifest-00000.json", "rank-00000.safetensors"])
def test_a_link_in_the_place_of_a_file_is_not_followed(folder, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(CheckpointRefused, match=f"{name}: expected a plain file, got a link"):
        CheckpointReader(folder).read(0, 1)


@pytest.mark.parametrize("name", ["COMMIT", "manifest-00000.json", "rank-00000.safetensors"])
def test_a_pipe_in_the_place_of_a_file_does_not_hang_us(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointRefused, match=f"{name}: expected a plain file, got a pipe"):
        CheckpointReader(folder).read(0, 1)


def test_a_link_in_the_place_of_a_folder_is_not_seen(folder, tmp_path):
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert list_folders(tmp_path) == []


def test_a_sparse_giant_is_refused_before_memory_is_asked_for(folder):
    for name, why in [
        ("rank-00000.safetensors", "expected .* bytes, got 1099511627776"),
        ("manifest-00000.json", "expected at most .* bytes, got 1099511627776"),
        ("COMMIT", "expected at most .* bytes, got 1099511627776"),
    ]:
        os.truncate(folder / name, 2**40)
        with pytest.raises(CheckpointCorrupt, match=f"{name}: {why}"):
            CheckpointReader(folder).read(0, 1)


def test_loading_works_with_every_way_into_pickle_poisoned(tmp_path):
    saved_at(tmp_path, 1)
    script = f"""
        import sys, pickle, _pickle, marshal, shelve
        import torch, numpy
        from heal import checkpoint
        import heal.checkpoint.store
        from tests.checkpoint.scenes import run
        there = run(seed=1)
        def poisoned(*args, **kwargs):
            raise SystemExit("pickle was used")
        for owner in (pickle, _pickle):
            for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
                setattr(owner, name, poisoned)
        torch.load = torch.save = marshal.loads = poisoned
        builtins = sys.modules["builtins"]
        builtins.eval = builtins.exec = poisoned
        print(there.load({str(tmp_path)!r}).step)
        there.save({str(tmp_path)!r}, 2)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "1", done.stderr


def test_no_source_on_the_load_path_mentions_pickle():
    for path in (ROOT / "heal" / "checkpoint").glob("*.py"):
        if path.name == "convert.py":
            continue  # for those who trust a file of another kind, and say so
        source = path.read_text()
        for word in ("import pickle", "torch.load", "torch.save", "eval(", "exec(", "_object("):
            assert word not in source, f"{path.name} has {word}"
