"""One worker slot: the Ray actor, and its connection to the fork servers that do the work.
In: encoded jobs. Out: their encoded progress, queries and result.
Imports fork_server (its environment), process and the messages; knows nothing of Ray.
"""
