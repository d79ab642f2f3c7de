"""Dynamo's frames: what it made of one, as records; and a frame made again from records, without tracing.
In: a frame that Dynamo has just traced, or one that it is about to trace. Out: a FrameProgram, or guarded code.
May import compiler.artifact.programs.
"""
