"""Reports: records in, text out. One module a command, with its tables and its JSON document.

All tables are made by `table`, all charts by `chart`, small texts by `text`. The page of the affinity report is filled
by `html` from what `layout` prepares, in the colours of `scale.css`.
"""
