"""`torchrelay train`: training jobs, their progress, files and reports.
In: a job file or a script. Out: a job at the service, its progress on the terminal, pages.
Imports gateway, jobfiles, reports and commands.output.
"""
