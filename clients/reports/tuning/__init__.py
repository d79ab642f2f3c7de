"""The report of a tuning job, or of a tuning lock.
Takes results. Gives rows, totals and slowdowns, an HTML page and a PNG picture.
"""
