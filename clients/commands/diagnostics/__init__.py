"""Commands that find out what is wrong: doctor and explain.
In: arguments, the last run's record. Out: one line for each check; for each miss, what differs.
Imports gateway, artifacts, reports.run_report and commands.output.
"""
