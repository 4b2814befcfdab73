"""What mkdocs does besides rendering: resolve public names, and clean up docstrings.

The pages of the reference list public names such as ``heal.Healer``. Many of them load on first
use, where static analysis cannot find them, so the module that defines a name is looked up here.
Modules can then move without a change to the pages. Roles such as ``:func:`` stay in the
docstrings, where editors understand them, and leave the page.
"""

import re
import sys
from importlib import import_module
from pathlib import Path

ROLE = re.compile(r":(?:func|class|mod|meth|data|attr|exc):(?=<code>|<a )")
SHORTENED = re.compile(r"(?<=<code>)~(?=[\w.]+</code>)")
DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def defined_in(name):
    """Return the path under which a public name is defined; the name itself if it is a module."""
    module, _, attribute = name.rpartition(".")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    try:
        found = getattr(import_module(module), attribute)
    finally:
        del sys.path[0]
    if not hasattr(found, "__qualname__"):
        return name
    return f"{found.__module__}.{found.__qualname__}"


def on_page_markdown(markdown, **_):
    """Replace public names by the paths where they are defined."""
    return DIRECTIVE.sub(lambda match: f"::: {defined_in(match[1])}", markdown)


def on_page_content(html, **_):
    """Remove the roles from a rendered page."""
    return SHORTENED.sub("", ROLE.sub("", html))
