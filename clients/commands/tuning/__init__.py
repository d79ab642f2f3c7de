"""`torchrelay tune`: tuning jobs, their reports, the tuning lock.
Takes a job file or a lock file. Starts a job at the service, writes pages and lock files.
Imports capture, gateway, jobfiles, reports and commands.output.
"""
