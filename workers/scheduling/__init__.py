"""Which worker slot gets a job: the Ray cluster's nodes, and the queue of jobs that wait for a slot.
In: settings, and what a job needs. Out: an actor placed on a node; an idle slot that fits.
Imports slot and what is below it, never training.
"""
