"""One file per kind of symptom; :mod:`heal.detect` puts them together."""
