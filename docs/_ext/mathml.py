"""Formulas as MathML, which every current browser draws by itself: the pages need no network and no script."""

import re

from docutils import nodes
from docutils.utils.math import MathError, latex2mathml
from sphinx.util import logging

logger = logging.getLogger(__name__)

# Signs that read well in a docstring → their LaTeX.
_SIGNS = {"⊤": r"\top ", "½": r"\tfrac{1}{2}", "²": "^{2}", "‖": r"\Vert ", "−": "-", "₁": "_{1}", "₂": "_{2}"}


def _convert(node: nodes.Node, as_block: bool) -> str:
    source = node.astext().replace("{align*}", "{aligned}").replace("{align}", "{aligned}")
    source = "".join(_SIGNS.get(sign, sign) for sign in source)
    source = re.sub(r"\\([td]?frac)\s*(\d)\s*(\d)", r"\\\1{\2}{\3}", source)  # \tfrac12
    source = re.sub(r"\\(sqrt|mathbf)\s*(\d)", r"\\\1{\2}", source)
    try:
        return latex2mathml.tex2mathml(source, as_block=as_block)
    except MathError as error:
        logger.warning("cannot write %r as MathML: %s", source, error, location=node)
        return f"<code>{source}</code>"


def _inline(translator, node):
    translator.body.append(_convert(node, as_block=False))
    raise nodes.SkipNode


def _display(translator, node):
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    anchor = f' id="{node["ids"][0]}"' if node.get("ids") else ""
    translator.body.append(f'<div class="math"{anchor}>{number}{_convert(node, as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
