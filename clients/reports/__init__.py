"""Reports for people: of a process's run, a tuning job, a training job and a profile.
Counters, events, results and traces enter; structs, HTML pages, pictures and advice leave.
Imports compiler, jobfiles, settings and atomic_file. Needs no torch.
"""
