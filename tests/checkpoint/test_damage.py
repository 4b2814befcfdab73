"""Whatever happens to the bytes of a checkpoint is noticed, and an older one is used."""

import contextlib
import random
import shutil

import pytest

from heal.checkpoint import CheckpointError, CheckpointStore
from heal.checkpoint.reading import CheckpointReader
from tests.checkpoint.scenes import assert_same, files_of, run, saved_at


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A store with two checkpoints, of steps 1 and 3."""
    directory = tmp_path_factory.mktemp("pair")
    saved_at(directory, 1, 3)
    return directory


def newest(directory):
    """Step of the newest checkpoint that can be read, and what was said of others."""
    store = CheckpointStore(directory)
    found = store.load()
    return None if found is None else found.step, store.notes


def flip(data: bytearray, chance: random.Random) -> bytes:
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def truncate(data: bytearray, chance: random.Random) -> bytes:
    return bytes(data[: chance.randrange(len(data))])


def extend(data: bytearray, chance: random.Random) -> bytes:
    return bytes(data) + chance.randbytes(chance.randrange(1, 20))


def swap(data: bytearray, chance: random.Random) -> bytes:
    """Exchange two words: a sum that forgets the order would not notice."""
    first, second = (8 * chance.randrange(len(data) // 8) for _ in range(2))
    before = bytes(data)
    data[first : first + 8], data[second : second + 8] = (
        data[second : second + 8],
        data[first : first + 8],
    )
    return bytes(data) if bytes(data) != before else flip(data, chance)


def damage_in_turn(directory, count, seed):
    chance = random.Random(seed)
    files = files_of(directory / "step-000003")
    kinds = [flip, flip, truncate, extend, swap]
    for i in range(count):
        path = files[i % len(files)]
        whole = path.read_bytes()
        kind = kinds[(i // len(files)) % len(kinds)]
        path.write_bytes(kind(bytearray(whole), chance))
        try:
            step, notes = newest(directory)
            assert step == 1, f"{kind.__name__} of {path.name} went unnoticed"
            assert len(notes) == 1
            assert "step-000003 cannot be used" in notes[0]
        finally:
            path.write_bytes(whole)
    assert newest(directory) == (3, [])


def test_100_random_damages_of_every_file_are_noticed_and_the_older_checkpoint_is_used(pair):
    damage_in_turn(pair, 100, seed=0)


@pytest.mark.slow
def test_3000_random_damages_are_noticed(pair):
    damage_in_turn(pair, 3000, seed=1)


def test_every_byte_of_commit_counts(pair):
    path = pair / "step-000003" / "COMMIT"
    whole = path.read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            CheckpointReader(path.parent)
    path.write_bytes(whole)


@pytest.mark.parametrize("name", ["COMMIT", "manifest-00000.json", "rank-00000.safetensors"])
def test_a_missing_file_is_noticed(pair, tmp_path, name):
    there = tmp_path / "copy"
    shutil.copytree(pair, there)
    (there / "step-000003" / name).unlink()
    assert newest(there)[0] == 1


def test_the_message_names_the_file_and_the_tensor(pair, tmp_path):
    there = tmp_path / "copy"
    shutil.copytree(pair, there)
    path = there / "step-000003" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors: tensor '.+' is not what"):
        CheckpointReader(path.parent).check()


def test_a_run_falls_back_to_the_checkpoint_before_and_says_why(tmp_path):
    bits = saved_at(tmp_path, 1, 3)
    path = tmp_path / "step-000003" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    again = run(seed=1)
    resumed = again.load(tmp_path)
    assert resumed.step == 1
    assert "step-000003 cannot be used" in resumed.notes[0]
    assert_same(again.bits(), bits[1])


def test_manifests_of_two_saves_cannot_be_mixed(tmp_path):
    saved_at(tmp_path, 1, 3)
    for name in ("manifest-00000.json", "rank-00000.safetensors"):
        shutil.copy(tmp_path / "step-000001" / name, tmp_path / "step-000003" / name)
    assert newest(tmp_path)[0] == 1


def mutate(data: bytearray, chance: random.Random) -> bytes:
    """Damage of the kind that parsers stumble over: pieces cut, doubled, moved, made absurd."""
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data) + 1)
        length = chance.choice([1, 1, 2, 8, 64])
        piece = chance.choice(
            [
                b"",
                b"0",
                b"-",
                b"9" * 30,
                b'"',
                b"[",
                b"{",
                b"null",
                b"\0",
                b"1e400",
                b'"$":',
                b"../",
                b"\xff\xff",
                b"true",
                bytes(data[at : at + length]) * 3,
            ]
        )
        data[at : at + chance.choice([0, length])] = piece
    return bytes(data) or b"x"


def fuzz(directory, tries, seed):
    """Mutate files so that all checksums fit again: the parsers themselves are at stake."""
    from heal.checkpoint.manifest import digest

    chance = random.Random(seed)
    folder = directory / "step-000003"
    whole = {path: path.read_bytes() for path in files_of(folder)}
    manifest, commit = folder / "manifest-00000.json", folder / "COMMIT"
    for _ in range(tries):
        changed = dict(whole)
        if chance.random() < 0.7:
            changed[manifest] = mutate(bytearray(whole[manifest]), chance)
            line = whole[commit].partition(b"\n")[0]
            line = line.replace(
                digest(whole[manifest]).encode(), digest(changed[manifest]).encode()
            )
        else:
            line = mutate(bytearray(whole[commit].partition(b"\n")[0]), chance)
        changed[commit] = line + b"\n" + digest(line).encode() + b"\n"
        for path, data in changed.items():
            path.write_bytes(data)
        with contextlib.suppress(CheckpointError):  # any other exception fails the test
            CheckpointReader(folder).read(0, 1)
    for path, data in whole.items():
        path.write_bytes(data)


def test_the_parsers_survive_two_hundred_mutations(pair):
    fuzz(pair, 200, seed=0)


@pytest.mark.slow
def test_the_parsers_survive_ten_thousand_mutations(pair):
    fuzz(pair, 10_000, seed=random.randrange(2**32))
