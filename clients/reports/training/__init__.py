"""The report of a training job.
Takes its events and its ranks' profiles. Gives series, marks and advice, and an HTML page with charts.
"""
