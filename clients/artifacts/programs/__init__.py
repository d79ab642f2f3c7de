"""Programs: a function that was traced once starts without tracing.
In: a frame of Dynamo's. Out: what an earlier process made of it, checked; or its record, kept for the next one.
"""
