"""The report of a training job.
Its events and its ranks' profiles enter; series, marks and advice, and an HTML page with charts leave.
Imports reports.html_page, reports.svg and reports.profiling.
"""
