"""Add a download link to every notebook and, on GitHub Actions and Read the Docs, a link to Colab."""

import os
import re
import shutil
from pathlib import Path


def repository() -> str | None:
    """Return ``"owner/name"`` of the GitHub repository that is being built."""
    clone = re.search(r"github\.com[:/](.+?)(?:\.git)?$", os.environ.get("READTHEDOCS_GIT_CLONE_URL", ""))
    return os.environ.get("GITHUB_REPOSITORY") or (clone[1] if clone else None)


def _links(app, pagename, templatename, context, doctree):
    source = Path(app.srcdir) / f"{pagename}.ipynb"
    if not source.exists():
        return
    links = [f'<a href="{source.name}" download>Download this notebook</a>']
    name = repository()
    if name:
        address = f"https://colab.research.google.com/github/{name}/blob/main/docs/{pagename}.ipynb"
        links.append(f'<a href="{address}">Open it in Colab</a>')
        links.append(f'there, run <code>!pip install "matbackprop[all] @ git+https://github.com/{name}"</code> first')
    context["body"] = f'<p class="notebook-links">{" · ".join(links)}</p>' + context["body"]


def _copy(app, error):
    if error is None and app.builder.format == "html":
        for source in Path(app.srcdir, "notebooks").glob("*.ipynb"):
            shutil.copy(source, Path(app.outdir, "notebooks", source.name))


def setup(app):
    app.connect("html-page-context", _links)
    app.connect("build-finished", _copy)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
