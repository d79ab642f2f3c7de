"""Jobs that run for hours: stored in Redis, run by the dispatcher that holds their lease.
A request for a job enters; its events and results leave.
May import compile/ and all below it; tuning/ and training/ do not import each other.
"""
