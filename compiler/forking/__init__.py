"""Copies of this process: to work ahead on another processor, or to run what may crash.
A function and bytes go in; the bytes that the copy worked out come out, or that it was lost.
Imports nothing of ours.
"""
