"""The progress bar of ``Healer.run``."""

from heal.journal import LOG
from heal.progress_bar import progress_bar
from tests.heal.runs import regression


def test_warnings_come_above_the_bar_and_once(monkeypatch, capsys):
    healer = regression().healer()
    healer.exits.dismiss()
    monkeypatch.setattr(LOG, "propagate", False)
    monkeypatch.setattr(LOG, "handlers", [])  # as in a program that set up none
    with progress_bar(healer, 10, True) as show:
        show(0)
        LOG.warning("heal: step 3: nonfinite_loss")
        show(5)
    assert not LOG.hasHandlers()
    lines = [line.strip() for line in capsys.readouterr().err.replace("\r", "\n").splitlines()]
    assert lines.count("heal: step 3: nonfinite_loss") == 1
    assert "5/10" in lines[-1]
