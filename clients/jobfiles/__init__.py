"""The files that people write and version (tuning and training jobs, tuning locks), and what jobs take along.
In: YAML, TOML, captured graphs, a working directory. Out: checked structs with line numbers, packed bytes;
locks written. Needs no torch and no network.
"""
