"""Reports for people: of a process's run, a tuning job, a training job and a profile.
Takes counters, events, results and traces. Gives structs, HTML pages, pictures and advice. Needs no torch.
"""
