"""The report of a tuning job, or of a tuning lock.
In: results. Out: rows, totals and regressions; an HTML page; plots.
Imports reports.html_page, reports.roofline and jobfiles.
"""
