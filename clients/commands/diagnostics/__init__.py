"""Commands that find out what is wrong: doctor and explain.
Takes arguments and the last run's record. Prints one line for each check; for each miss, what differs.
"""
