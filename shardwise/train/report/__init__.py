"""The report of a run: what it says, as one value, and the files that say it.

summary.py           the finished run, as rank 0 saw it
report_contents.py   what the report says of it: figures, sentences and tables, each made once
section.py           its parts, as values
plots.py             its pictures
files.py             writes report.md, report.html and what is beside them
"""
