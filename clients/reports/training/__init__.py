"""The report of a training job.
In: its events and its ranks' profiles. Out: series, marks and advice; an HTML page with charts.
Imports reports.html_page and reports.profiling.
"""
