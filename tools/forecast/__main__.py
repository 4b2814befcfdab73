import argparse

from tools.forecast import command

parser = argparse.ArgumentParser(
    prog="python -m tools.forecast",
    description=command.__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
command.add_arguments(parser)
raise SystemExit(command.run(parser.parse_args()))
