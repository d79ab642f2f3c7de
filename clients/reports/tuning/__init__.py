"""The report of a tuning job, or of a tuning lock.
Results enter; rows, totals and regressions, an HTML page and PNG pictures leave.
Imports jobfiles, and reports.html_page, reports.svg and reports.roofline.
"""
