"""The composition of the service: every part of it, and of each namespace, is made here, once in each process.
Takes settings; makes SharedParts, and DispatcherParts for a process that has workers.
May import every folder below; knows no HTTP.
"""
