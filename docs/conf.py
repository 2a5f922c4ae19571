"""Sphinx configuration. ``python -m sphinx -W -b html docs docs/_build/html`` builds the pages without a network."""

import re
import sys
from pathlib import Path

from docutils import nodes

import matbackprop

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "matbackprop"
author = "The matbackprop authors"
copyright = "2026, the matbackprop authors"
version = release = matbackprop.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "command_help",
    "katex",
    "measured",
    "notebooks",
    "sphinx_copybutton",
]
myst_enable_extensions = ["amsmath", "attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks contain their output; a test runs them
nb_merge_streams = True
html_math_renderer = "katex"
exclude_patterns = ["_build", "_generated"]
suppress_warnings = ["config.cache"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Gradient", "notes_style"), ("Formula", "notes_style"), ("Reference", "notes_style")]

html_theme = "furo"
html_title = f"matbackprop {release}"
html_logo = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_theme_options = {
    "sidebar_hide_name": True,  # the logo contains the name
    "light_css_variables": {"color-brand-primary": "#1f66c1", "color-brand-content": "#1f66c1"},
    "dark_css_variables": {"color-brand-primary": "#6ea8f2", "color-brand-content": "#6ea8f2"},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
pygments_style = "friendly"
pygments_dark_style = "github-dark"


_MARKUP = re.compile(r"(?<![*\w])\*(?=\w)(?=[^*]*$)|(?<=\()\*(?=\w)|\|")


def _escape(app, what, name, obj, options, lines):
    """Escape ``(*b, m)`` and ``|x|`` outside literals: docstrings are plain text."""
    block = None  # indentation of a formula or example, which is not changed
    literal = False  # whether the line starts inside a literal
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if block is not None and (not line.strip() or indent > block):
            continue
        block = None
        if line.strip().startswith((">>>", ".. math::")) or line.rstrip().endswith("::"):
            block = indent - line.strip().startswith(">>>")
            continue
        spans = line.split("``")
        for n, span in enumerate(spans):
            if (n % 2 == 1) == literal:
                parts = re.split(r"(:[a-z:]+:`.*?`)", span)
                parts[::2] = [_MARKUP.sub(r"\\\g<0>", part) for part in parts[::2]]
                spans[n] = "".join(parts)
        literal ^= len(spans) % 2 == 0
        lines[i] = "``".join(spans)


def _skip(app, what, name, obj, skip, options):
    """Skip the fields of named tuples, which their docstring lists."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


_NUMBER = re.compile(r"(NaN )?[\d.]+(e-\d+| %)( /)?")


def _join_numbers(app, doctree):
    """Prevent line breaks inside numbers in tables."""
    for entry in doctree.findall(nodes.entry):
        for text in list(entry.findall(nodes.Text)):
            joined = _NUMBER.sub(lambda number: number[0].replace("-", "\u2011").replace(" ", "\u00a0"), text)
            text.parent.replace(text, nodes.Text(joined))


def setup(app):
    app.connect("doctree-read", _join_numbers)
    app.connect("autodoc-process-docstring", _escape, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", _skip)
