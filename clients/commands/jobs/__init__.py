"""`torchrelay train` and `torchrelay tune`: jobs, their progress, files, winners and reports.
Takes a job file, a script or a lock file. Starts a job at the service, prints its progress, writes pages.
"""
