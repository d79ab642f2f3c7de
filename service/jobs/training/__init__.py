"""Training jobs: graphs compiled before ranks start, then ranks on the nodes, their metrics, logs and files.
A TrainRequest enters; events, archived metrics and logs, and files leave.
May import compile/ and all below it.
"""
