"""Jobs of hours, durable in Redis and driven by whichever gateway holds their lease.
A job's request in; its events and results out.
May import compile/ and all below it; tuning/ and training/ do not import each other.
"""
