"""Sphinx settings that make README.ipynb a page as Ray's documentation would show it.

The theme, the extensions that touch a notebook, and MyST's options are those of Ray's
own doc/source/conf.py; `bash ci/docs.sh` builds the page.
"""

project = "GPT-2 with Ray Train and JAX"
html_title = project
language = "en"

# The source folder is the repository: images/ lies beside the notebook.
root_doc = "README"
include_patterns = ["README.ipynb"]
exclude_patterns = [".*", "build", "data", "storage"]  # folders not worth a walk

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
    "disable_search": True,  # there is a single page
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
