"""The operator tables, one JSON file for each torch version: written by generate.py, read by table.py."""
