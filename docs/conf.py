"""Settings of Sphinx for `make docs`.

The source folder is the whole clone. So README.md and the files in docs/ are pages of the site as
they are, and their links to each other work as they do on GitHub.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from docutils import nodes

import figures
import module_map
import padam_ext

project = "padam_ext"
author = "The padam_ext maintainers"
release = padam_ext.__version__
html_title = f"padam_ext {release}"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "benchmarks/results/**.md"]
# Not searched for pages: each is large.
exclude_patterns = [".*", "build", "dist", "out", "**/__pycache__"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",  # the source beside the API, since nothing is published elsewhere
]
myst_heading_anchors = 3  # those that GitHub makes
highlight_language = "text"
smartquotes_action = "D"  # dashes, but no other quotes: "packed32" is a value

# Every name must lead somewhere. Those of other projects do not: that needs their indexes, and the
# build no network.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(torch|collections|contextlib|typing)\..*|Any|ParamsT")]
napoleon_use_ivar = True  # attributes as a list: properties are documented one by one
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
default_role = "code"  # of `single backquotes` in docstrings

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
templates_path = ["_templates"]
html_additional_pages = {"index": "redirect.html"}  # the first page is docs/index.html
html_use_index = False  # the page of the API is one
html_copy_source = False
html_show_copyright = False

figures.draw(DOCS / "generated" / "exponent.svg")
module_map.draw(DOCS / "generated" / "modules.svg")


def _complete_links(app, docname, source):
    """Makes pages of the measured tables, and leads links from their folders to them."""
    if docname.startswith("benchmarks/results/"):
        name = docname.removeprefix("benchmarks/results/")
        source[0] = f"# {name}\n\n{source[0]}"
    source[0] = re.sub(r"\]\(((?:\.\./)?benchmarks/results/\w+)\)", r"](\1/tables.md)", source[0])


def _link_images(app, doctree):
    """Has Sphinx link each picture to its full size, as it does where a width is given."""
    for image in doctree.findall(nodes.image):
        image["width"] = "100%"


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", _complete_links)
    app.connect("doctree-read", _link_images)
