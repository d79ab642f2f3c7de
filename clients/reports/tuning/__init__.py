"""The report of a tuning job, or of a tuning lock.
Takes results. Gives rows, totals and slowdowns, an HTML page and a PNG picture.
Imports jobfiles, and reports.html_page, reports.svg and reports.roofline.
"""
