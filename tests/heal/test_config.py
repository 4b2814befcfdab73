import dataclasses
import math
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from heal import HealingConfig
from heal.config import OLD
from heal.config_fields import ConfigError, settings_of
from heal.detectors.watch import Watch

SETTINGS = settings_of(HealingConfig)


def test_the_defaults_are_those_that_were_promised():
    config = HealingConfig()
    promised = {
        "max_recovery_attempts": 5,
        "nan_patience": 5,
        "nan_action": "rollback",
        "loss_spike_factor": 5.0,
        "zclip_enabled": True,
        "zclip_z_threshold": 2.5,
        "max_grad_norm": 0.0,
        "lr_factor": 0.5,
        "snapshot_memory_factor": 4.0,
        "lag": 2,
        "after_rollback": "skip_data",
    }
    assert promised.items() <= config.to_dict().items()
    fixed = {"eval_gap": 2.0, "backoff_seconds": 30.0, "micro_batch_grow_steps": 1000}
    assert {name: getattr(config, name) for name in fixed} == fixed


def test_presets_differ_from_the_defaults_in_these_values_only():
    def changed(config):
        default = HealingConfig().to_dict()
        return {k: v for k, v in config.to_dict().items() if v != default[k]}

    assert changed(HealingConfig.aggressive()) == {
        "nan_patience": 1,
        "zclip_z_threshold": 2.0,
        "max_recovery_attempts": 10,
    }
    assert changed(HealingConfig.conservative()) == {
        "nan_patience": 10,
        "loss_spike_factor": 10.0,
        "zclip_z_threshold": 4.0,
        "max_recovery_attempts": 2,
    }
    assert HealingConfig.aggressive(nan_patience=2).nan_patience == 2


def test_settings_cannot_be_changed_or_added():
    config = HealingConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lag = 3
    with pytest.raises((TypeError, AttributeError)):
        config.lagg = 3
    with pytest.raises(TypeError):
        HealingConfig(5)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_explained(name):
    kind, default, about = SETTINGS[name]
    assert about.doc.endswith(".")
    assert about.group
    assert isinstance(default, kind)
    is_free = kind in (bool, str)
    assert about.choices or is_free or about.least is not None or about.above is not None


def wrong_values(kind, about):
    if kind is bool:
        return [1, "true", None]
    if kind is str:
        return ["neither", 3, None, ""] if about.choices else [3, None]
    values = ["1", None, True, math.nan, math.inf, -math.inf, [1]]
    values += [] if kind is float else [1.5]
    values += [kind(about.least - 1)] if about.least is not None else []
    values += [kind(about.most + 1)] if about.most is not None else []
    values += [kind(about.above)] if about.above is not None else []
    return values


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_value_is_named_with_what_was_wanted(name):
    kind, _, about = SETTINGS[name]
    for value in wrong_values(kind, about):
        with pytest.raises(ConfigError) as raised:
            HealingConfig(**{name: value})
        told = str(raised.value)
        assert told == f"{name}: expected {about.wanted(kind)}, got {value!r}"


def test_numbers_of_other_libraries_are_taken_as_plain_ones():
    config = HealingConfig(lag=np.int64(3), lr_factor=np.float32(0.25), max_grad_norm=3)
    values = config.lag, config.lr_factor, config.max_grad_norm
    assert [type(value) for value in values] == [int, float, float]


@pytest.mark.parametrize(
    "config",
    [
        HealingConfig(),
        HealingConfig.aggressive(),
        HealingConfig(
            lr_factor=1 / 3, after_rollback="replay_data", zclip_enabled=False, max_grad_norm=1e-9
        ),
    ],
)
def test_toml_there_and_back(config, tmp_path):
    text = config.to_toml()
    assert HealingConfig.from_toml(text) == config
    path = tmp_path / "heal.toml"
    path.write_text(text)
    assert HealingConfig.from_toml(path) == config
    assert HealingConfig.from_toml(str(path)) == config


def test_toml_comments_every_setting_and_marks_what_was_changed():
    text = HealingConfig.aggressive().to_toml()
    for name, (_, _, about) in SETTINGS.items():
        assert f"\n{name} = " in text
        assert about.doc.split()[0] in text
    assert "Default: 5.\nmax_recovery_attempts = 10" in text
    assert max(map(len, text.splitlines())) <= 98


def test_toml_may_be_a_table_of_a_larger_file():
    config = HealingConfig.from_toml(
        '[model]\nsize = 3\n[heal]\nlag = 0\nafter_rollback = "replay_data"\n'
    )
    assert (config.lag, config.after_rollback) == (0, "replay_data")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "nan_patiense = 3",
            "nan_patiense = 3: expected nan_patience, got no setting of that name",
        ),
        ("zzz = 1", "zzz = 1: expected one of max_recovery_attempts, "),
        ("lag = 'two'", "lag: expected a whole number >= 0 and <= 64, got 'two'"),
        ("lag = 2.0", "lag: expected a whole number >= 0 and <= 64, got 2.0"),
        ("lr_factor = nan", "lr_factor: expected a number > 0 and <= 1, got nan"),
        ("lr_factor = inf", "lr_factor: expected a number > 0 and <= 1, got inf"),
        (
            "after_rollback = 'both'",
            'after_rollback: expected one of "skip_data", "replay_data", got',
        ),
        ("lag = ", "is not TOML"),
        ("heal = 3", "heal: expected a table, got 3"),
        ("[heal]\nlag = {a = 1}", "lag: expected a whole number"),
    ],
)
def test_toml_that_is_wrong_is_refused_by_name(text, message):
    with pytest.raises(ConfigError) as raised:
        HealingConfig.from_toml(text)
    assert message in str(raised.value)


def test_a_file_that_is_not_there_is_an_error_of_the_file():
    with pytest.raises(FileNotFoundError):
        HealingConfig.from_toml(Path("no/such/heal.toml"))
    assert HealingConfig.from_toml("") == HealingConfig()


def test_command_lines_override():
    words = [
        "lag=0",
        "lr_factor = 0.25",
        "zclip_enabled=false",
        "after_rollback=replay_data",
        "lag=3",
    ]
    config = HealingConfig().override(words)
    assert (config.lag, config.lr_factor, config.zclip_enabled) == (3, 0.25, False)
    assert HealingConfig().override([]) == HealingConfig()
    assert HealingConfig().override("lag=3") == HealingConfig(lag=3)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lag", "expected key=value, a str, got 'lag'"),
        (b"lag=1", "expected key=value, a str, got b'lag=1'"),
        (("lag", 1), "expected key=value, a str, got ('lag', 1)"),
        ("lagg=1", "expected lag"),
        ("lag=two", "lag: expected a whole number"),
        ("lag=1e3", "got '1e3'"),
        ("lr_factor=nan", "got nan"),
        ("zclip_enabled=maybe", "zclip_enabled: expected true or false, got 'maybe'"),
        ("lag=__import__('os')", "expected a whole number"),
    ],
)
def test_a_wrong_word_on_the_command_line_is_refused_by_name(word, message):
    with pytest.raises(ConfigError) as raised:
        HealingConfig().override([word])
    assert message in str(raised.value)


HUGE = 10**400


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HealingConfig(nan_patience=HUGE), "got a whole number of 1329 bits"),
        (lambda: HealingConfig(max_grad_norm=HUGE), "got a whole number of 1329 bits"),
        (lambda: HealingConfig(nan_patience=2**63), "more than 63 bits"),
        (lambda: HealingConfig.from_toml(f"nan_patience = {HUGE}"), "more than 63 bits"),
        (lambda: HealingConfig.from_toml("lag = 1" + "0" * 5000), "the text is not TOML"),
        (lambda: HealingConfig().override([f"nan_patience={HUGE}"]), "more than 63 bits"),
        (lambda: HealingConfig().override(["lag=1" + "0" * 5000]), "got '1000"),
        (lambda: HealingConfig().override(["max_grad_norm=1e400"]), "got inf"),
    ],
)
def test_a_number_that_is_too_large_is_refused_by_name_and_in_few_words(make, message):
    with pytest.raises(ConfigError) as raised:
        make()
    assert message in str(raised.value)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "make",
    [
        lambda: HealingConfig(nan_patence=3),
        lambda: dataclasses.replace(HealingConfig(), nan_patence=3),
        lambda: HealingConfig.aggressive(nan_patence=3),
    ],
    ids=["made", "replaced", "preset"],
)
def test_an_unknown_setting_is_named_with_its_value_and_the_nearest_that_is_known(make):
    with pytest.raises(ConfigError, match="nan_patence = 3: expected nan"):
        make()


@pytest.mark.parametrize("key", [5, None, b"lag", ("lag",)])
def test_a_name_that_is_no_text_is_shown_with_its_value(key):
    with pytest.raises(ConfigError) as raised:
        HealingConfig.from_dict({key: 1})
    name = f"{key!r} = 1: expected the name of a setting, a str, got {type(key).__name__}"
    assert str(raised.value) == name


def test_a_file_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "heal.toml"
    path.write_bytes(b"lag = 3 # \xff")
    with pytest.raises(ConfigError, match=r"heal\.toml: .* got byte 0xff at position 10"):
        HealingConfig.from_toml(path)


def test_a_path_with_an_equals_sign_is_a_path(tmp_path):
    folder = tmp_path / "lr=1"
    folder.mkdir()
    for name in ("heal.toml", "settings"):
        (folder / name).write_text("lag = 3")
        assert HealingConfig.from_toml(str(folder / name)).lag == 3
    with pytest.raises(FileNotFoundError):
        HealingConfig.from_toml(str(folder / "other.toml"))
    with pytest.raises(TypeError, match="path_or_text: expected a path"):
        HealingConfig.from_toml(b"lag = 3")


def test_a_setting_outside_of_the_table_is_refused_and_what_is_others_is_not():
    with pytest.raises(
        ConfigError, match=r"nan_patience = 9: .* got it before \[heal\] in the text"
    ):
        HealingConfig.from_toml("nan_patience = 9\n[heal]\nlr_factor = 0.7")
    theirs = 'data = "/data/books"\nseed = 1\n[lag]\nof = 3\n[heal]\nlr_factor = 0.7'
    assert HealingConfig.from_toml(theirs).lr_factor == 0.7


FIRST = """
nan_patience = 7
data = "replay"
max_consecutive = 50
skip_window = 3
micro_batch_min = 2
snapshot_memory_fraction = 6.0
lr_floor = 0.02
"""
"""Settings as a file of version 0.1 has them."""

PRESENT = {
    "nan_patience": 7,
    "after_rollback": "replay_data",
    "max_consecutive_skips": 50,
    "snapshot_memory_factor": 6.0,
}


@pytest.mark.parametrize(
    "read",
    [
        lambda values: HealingConfig(**values),
        HealingConfig.from_dict,
        lambda values: HealingConfig.from_toml(FIRST),
        lambda values: HealingConfig.from_toml(f"[heal]{FIRST}"),
        lambda values: HealingConfig().override(FIRST.replace('"', "").split("\n")[1:-1]),
        lambda values: HealingConfig.conservative(
            **{**values, "loss_spike_factor": 5.0, "zclip_z_threshold": 2.5},
            max_recovery_attempts=5,
        ),
    ],
    ids=["constructor", "dict", "TOML", "table", "command line", "preset"],
)
def test_settings_of_version_01_are_read_with_a_warning_that_names_what_replaced_them(read):
    values = {
        "nan_patience": 7,
        "data": "replay",
        "max_consecutive": 50,
        "skip_window": 3,
        "micro_batch_min": 2,
        "snapshot_memory_fraction": 6.0,
        "lr_floor": 0.02,
    }
    with pytest.warns(DeprecationWarning, match="settings of version 0.1") as caught:
        config = read(values)
    assert config == HealingConfig(**PRESENT)
    said = " ".join(str(warning.message) for warning in caught)
    assert re.search("data = '?replay'? is now after_rollback = '?replay_data", said)
    assert "max_consecutive = " in said
    assert "is now max_consecutive_skips" in said
    assert "lr_floor has no effect: it is fixed; a hook may plan ScaleLr(factor, floor)" in said


@pytest.mark.parametrize("name", sorted(OLD))
def test_every_old_setting_is_gone_and_says_what_to_use(name):
    assert name not in SETTINGS
    value = "skip" if name == "data" else 3
    with pytest.warns(DeprecationWarning, match=f"{name} ") as caught:
        config = HealingConfig(**{name: value})
    (warning,) = caught
    assert warning.filename == __file__
    replaced = getattr(OLD[name], "to", None)
    if replaced is None:
        assert config == HealingConfig()
    else:
        assert f"is now {replaced} = " in str(warning.message)
        assert replaced in SETTINGS


def test_an_old_and_a_new_name_for_the_same_setting_are_a_contradiction():
    with pytest.raises(ConfigError, match=r"after_rollback: expected .* got it as data too"):
        HealingConfig(data="skip", after_rollback="replay_data")


def test_settings_of_today_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert HealingConfig.from_toml(HealingConfig().to_toml()) == HealingConfig()
        assert HealingConfig.aggressive().override("lag=1").lag == 1


def test_settings_are_few_and_in_four_groups():
    groups = [about.group for _, _, about in SETTINGS.values()]
    assert list(dict.fromkeys(groups)) == ["budget", "detection", "cure", "durability"]
    assert groups == sorted(groups, key=list(dict.fromkeys(groups)).index)
    assert len(SETTINGS) <= 29


def test_the_setting_lists_every_detector():
    page = (Path(__file__).parents[2] / "docs/config.md").read_text()
    (row,) = re.findall(r"^\| `disabled_detectors` \|.*separated by commas: (.*?)\.", page, re.M)
    assert row.split(", ") == [*Watch(HealingConfig()).detectors, "health"]
