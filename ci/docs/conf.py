"""Sphinx settings that show the repository's pages as Ray's documentation would.

The theme and the extensions are those of Ray's own doc/source/conf.py.
"""

import sys
from pathlib import Path

import nbformat

sys.path.append(str(Path(__file__).resolve().parents[1]))
import render_readme

project = "GPT-2 on Ray Train"
html_title = project
language = "en"

# The source folder is the repository, so links and images are those that GitHub follows.
root_doc = "README"
PAGES = {  # in the header's order, under these names
    "README": "Tutorial",
    "docs/guide": "Guide",
    "benchmarks/README": "Benchmarks",
    "CONTRIBUTING": "Contribute",
    "docs/upstream": "Upstream",
}
include_patterns = ["README.ipynb", *(f"{page}.md" for page in PAGES)]
exclude_patterns = ["README.md", ".*", "build", "storage"]

extensions = ["myst_nb", "sphinx_copybutton"]
nb_execution_mode = "off"
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath", "html_image", "smartquotes"]

html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "disable_search": True,  # there are few pages
    "navbar_persistent": [],
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_sidebars = {"**": []}
html_static_path = ["static"]
html_css_files = ["page.css"]
html_copy_source = False


def add_contents(app, docname: str, source: list[str]) -> None:
    """Add what the notebook's cells showed, and the header's links, noise on GitHub."""
    if docname == root_doc:
        notebook = nbformat.reads(source[0], as_version=4)
        notebook = render_readme.with_outputs(notebook)
        entries = [f"{title} <{page}>" for page, title in PAGES.items()]
        entries[0] = f"{PAGES[root_doc]} <self>"
        contents = "\n".join(["```{toctree}", ":hidden:", "", *entries, "```"])
        notebook.cells.append(nbformat.v4.new_markdown_cell(contents))
        source[0] = nbformat.writes(notebook)


def setup(app) -> None:
    app.connect("source-read", add_contents)
