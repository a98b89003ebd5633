"""Reports: records in, text out. One module per command, with its tables and its JSON document.

All tables are made by `table`, small texts by `text`. The page of the affinity report: `layout`
prepares its contents, `html` fills the template, `scale.css` has its colours.
"""
