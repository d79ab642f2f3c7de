"""`torchrelay train`: training jobs, their progress, files and reports.
Takes a job file or a script. Starts a job at the service, prints its progress, writes pages.
Imports gateway, jobfiles, reports and commands.output.
"""
