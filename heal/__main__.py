"""``python -m heal`` is the ``heal`` command."""

from heal.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
