"""The report of a tuning job, or of a tuning lock.
Takes results. Gives rows, totals and slowdowns, an HTML page.
Imports jobfiles, and reports.html_page, reports.svg and reports.roofline.
"""
