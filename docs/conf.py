"""How `make docs` builds the site from the Markdown of this folder: Sphinx, with MyST to read it and furo to dress it."""

from reader_rag import __version__

project = "reader_rag"
author = "the reader_rag authors"
copyright = f"2026, {author}"  # noqa: A001 - Sphinx's name
release = version = __version__

extensions = ["myst_parser"]
root_doc = "contents"  # the order of the pages; index.md stays a page that reads well by itself
html_theme = "furo"
html_title = "reader_rag"
html_copy_source = False

myst_heading_anchors = 4  # links name headings, as on GitHub
myst_enable_extensions = ["dollarmath"]
nitpicky = True
