import subprocess
import sys

import pytest

from heal import HealingConfig
from heal.cli import COMMANDS, main
from tests.report.journals import sick_run


def test_init_prints_settings_that_can_be_read_back(capsys):
    assert main(["init"]) == 0
    assert HealingConfig.from_toml(capsys.readouterr().out) == HealingConfig()


def test_init_takes_presets_and_changes(capsys):
    assert main(["init", "--preset", "conservative", "lag=0"]) == 0
    printed = HealingConfig.from_toml(capsys.readouterr().out)
    assert printed == HealingConfig.conservative(lag=0)


def test_init_refuses_what_the_settings_refuse(capsys):
    assert main(["init", "lagg=0"]) == 2
    assert "expected lag" in capsys.readouterr().err


def test_init_does_not_overwrite_unless_told(tmp_path, capsys):
    path = str(tmp_path / "heal.toml")
    assert main(["init", "--output", path]) == 0
    assert main(["init", "--output", path, "lag=5"]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["init", "--output", path, "lag=5", "--force"]) == 0
    assert HealingConfig.from_toml(path).lag == 5
    assert main(["init", "--output", str(tmp_path / "no" / "folder")]) == 1


@pytest.mark.parametrize("words", [[], ["cure"]])
def test_a_command_that_is_none_is_told_which_there_are(words, capsys):
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2
    assert "command" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as raised:
        main([name, "--help"])
    assert raised.value.code == 0
    assert f"usage: heal {name}" in capsys.readouterr().out


def test_commands_stand_in_order_and_the_list_has_a_line_for_each(capsys):
    assert list(COMMANDS) == sorted(COMMANDS)
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for run in COMMANDS.values():
        assert run.__doc__.splitlines()[0].replace("``", "") in printed
        assert "``" not in printed


@pytest.mark.parametrize("command", ["watch", "report"])
def test_output_that_nobody_reads_is_no_error(command, tmp_path):
    words = [command, str(sick_run(tmp_path)), *(["--text"] if command == "report" else [])]
    process = subprocess.Popen(
        [sys.executable, "-m", "heal", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()  # as head does when it has its lines
    assert process.wait(timeout=300) == 1
    assert process.stderr.read() == b""


def test_a_broken_pipe_of_something_else_is_raised(monkeypatch):
    def failing(arguments):
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setitem(COMMANDS, "init", failing)
    with pytest.raises(BrokenPipeError, match="a worker is gone"):
        main(["init"])
