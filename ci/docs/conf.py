"""Sphinx settings that show the repository's pages as Ray's documentation would.

The theme, the extensions that touch a notebook, and MyST's options are those of Ray's
own doc/source/conf.py; `bash ci/docs.sh` builds the pages.
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
include_patterns = [
    "README.ipynb",
    *(f"{page}.md" for page in PAGES if page != root_doc),
]
exclude_patterns = [".*", "build", "storage"]  # folders not worth a walk

extensions = ["myst_nb", "sphinx_copybutton"]
nb_execution_mode = "off"
myst_heading_anchors = 3
myst_enable_extensions = [
    "amsmath",
    "colon_fence",
    "deflist",
    "dollarmath",
    "html_admonition",
    "html_image",
    "replacements",
    "smartquotes",
]

html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "disable_search": True,  # there are few pages
    "navbar_persistent": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_sidebars = {"**": []}
html_static_path = ["static"]
html_css_files = ["page.css"]
html_copy_source = False
html_use_index = False


def add_contents(app, docname: str, source: list[str]) -> None:
    """Add to the notebook what its cells showed, and the header's links.

    (On GitHub, a directive would be noise.)
    """
    if docname != root_doc:
        return
    notebook = render_readme.with_outputs(nbformat.reads(source[0], as_version=4))
    entries = [
        f"{title} <{'self' if page == root_doc else page}>"
        for page, title in PAGES.items()
        if page in app.env.found_docs
    ]
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *entries, "```"])
    notebook.cells.append(nbformat.v4.new_markdown_cell(toctree))
    source[0] = nbformat.writes(notebook)


def setup(app) -> None:
    app.connect("source-read", add_contents)
