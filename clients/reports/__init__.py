"""What happened, for people: one process' run, a tuning job, a training job, a profile.
In: counters, events, results and traces. Out: structs, HTML pages, plots and advice.
Imports compiler, jobfiles, settings and atomic_file. Needs no torch.
"""
