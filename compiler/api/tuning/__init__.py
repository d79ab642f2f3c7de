"""Messages of tuning jobs and of the tuning database, and what a job may name: operators and kernels.
Problems, kernels and graphs go in; jobs, results and requests to workers come out.
Imports request, tuning and errors.
"""
