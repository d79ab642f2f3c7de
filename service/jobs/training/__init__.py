"""Training jobs: graphs compiled before ranks start, then ranks on the nodes, their metrics, logs and files.
A TrainRequest in; events, archived metrics and logs, and files out.
May import compile/ and all below it.
"""
