"""One file per kind of symptom; :mod:`heal.detectors.watch` puts them together."""
