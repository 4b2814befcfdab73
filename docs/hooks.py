"""What mkdocs does besides: docstrings are written for Sphinx and read here by people.

Roles such as ``:func:`` stay in the docstrings, where editors understand them, and leave the page.
"""

import re

ROLE = re.compile(r":(?:func|class|mod|meth|data|attr|exc):(?=<code>|<a )")
SHORTENED = re.compile(r"(?<=<code>)~(?=[\w.]+</code>)")


def on_page_content(html, **_):
    """Take the roles out of a rendered page."""
    return SHORTENED.sub("", ROLE.sub("", html))
