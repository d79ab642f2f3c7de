"""Tuning jobs, training jobs and the tuning database over HTTP.
A job's description in; its state, results, files and events out.
May import ../../http and ../../wiring.
"""
