"""Tuning jobs, training jobs and the tuning database over HTTP.
Take a job's description; answer with its state, results, files and events.
May import ../../http and ../../parts.
"""
