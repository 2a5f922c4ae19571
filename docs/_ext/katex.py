"""Render formulas by KaTeX, which is included in the pages and needs no network."""

from html import escape

from docutils import nodes

# Unicode characters in docstrings → LaTeX.
_SIGNS = {"⊤": r"\top ", "½": r"\tfrac{1}{2}", "²": "^{2}", "‖": r"\Vert ", "−": "-", "₁": "_{1}", "₂": "_{2}"}


def _source(node: nodes.Node) -> str:
    source = node.astext().replace("{align*}", "{aligned}").replace("{align}", "{aligned}")
    lines = source.strip().split("\n\n")  # a blank line starts a new line of the formula
    source = source if len(lines) == 1 else r"\begin{gathered}" + r"\\[4pt] ".join(lines) + r"\end{gathered}"
    return escape("".join(_SIGNS.get(sign, sign) for sign in source))


def _inline(translator, node):
    translator.body.append(f'<span class="math">{_source(node)}</span>')
    raise nodes.SkipNode


def _display(translator, node):
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    anchor = f' id="{node["ids"][0]}"' if node.get("ids") else ""
    translator.body.append(f'{number}<div class="math"{anchor}>{_source(node)}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("katex", (_inline, None), (_display, None))
    app.add_css_file("katex/katex.min.css")
    app.add_js_file("katex/katex.min.js", loading_method="defer")
    app.add_js_file("formulas.js", loading_method="defer")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
