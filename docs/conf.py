"""The site, as Sphinx builds it by `make docs` from the pages that tools/stage_docs.py collects."""

project = "insitu"
copyright = "the authors of insitu"
root_doc = "README"
extensions = ["myst_parser"]
myst_heading_anchors = 5
myst_enable_extensions = ["attrs_inline"]
exclude_patterns = ["extra"]
html_theme = "furo"
html_title = "insitu"
html_extra_path = ["../build/docs-pages/extra"]
html_copy_source = False
html_show_sourcelink = False
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "monokai"
