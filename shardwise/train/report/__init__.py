"""The report of a run: what it says, as one value, and the files that say it.

summary.py           the finished run, as rank 0 saw it
report_contents.py   what the report says of it: figures, sentences and tables, each made once
markdown.py          report.md, with pictures beside it (plots.py)
html.py              report.html, one file with its figures in it (charts.py)
files.py             writes all of them
"""
