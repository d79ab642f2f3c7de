"""What tracing asked without a guard: look-ups, answers of functions, the order of sets.
In: a frame that Dynamo traces. Out: each question with its answer; at a start from records, whether that still holds.
Imports dynamo.programs and compiler.artifact.programs.
"""
