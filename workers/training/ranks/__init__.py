"""One rank of a training job on its node: its Ray Train worker, its process, and the reaper between them.
In: the job's driver by name, a rank's assignment. Out: the rank's events and its end.
Imports training.messages, process and the compiler's records.
"""
