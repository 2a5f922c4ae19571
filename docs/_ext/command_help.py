"""Directive ``{command-help} NAME``: the output of ``matbackprop NAME --help``."""

import contextlib
import io
import os

from docutils import nodes
from docutils.parsers.rst import Directive


def help_of(name: str) -> str:
    """Return the output of ``matbackprop NAME --help`` without colors, 86 columns wide."""
    from matbackprop import cli

    text = io.StringIO()
    before = {key: os.environ.get(key) for key in ("COLUMNS", "NO_COLOR", "TERM")}
    os.environ.update({"COLUMNS": "86", "NO_COLOR": "1", "TERM": "dumb"})
    try:
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            cli.main([*name.split(), "--help"])
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
    return text.getvalue().strip()


class CommandHelp(Directive):
    required_arguments = 0
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self):
        self.state.document.settings.env.note_reread()  # the text depends on the code
        try:
            text = help_of(self.arguments[0] if self.arguments else "")
        except ImportError as error:
            raise self.error(f"matbackprop {' '.join(self.arguments)} cannot be imported: {error}") from error
        if not text:
            raise self.error(f"matbackprop {' '.join(self.arguments)} --help printed nothing")
        return [nodes.literal_block(text, text, language="text")]


def setup(app):
    app.add_directive("command-help", CommandHelp)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
