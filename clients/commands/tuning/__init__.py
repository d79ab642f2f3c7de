"""`torchrelay tune`: tuning jobs, their reports, the tuning lock.
In: a job file or a lock file. Out: a job at the service, pages, lock files.
Imports capture, gateway, jobfiles, reports and commands.output.
"""
