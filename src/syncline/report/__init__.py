"""A run as something to keep: `syncline report` and `syncline compare`.

`reading` reads a run's folder, as far as it can be read; `charts` draws lines as SVG; `elements` are the parts of a
page; `single` is the page of one run, `several` compares runs, as text and as a page. The pages are files without
scripts and without anything to load.
"""
