"""Exports a trained model as files that run without Python: AOTInductor packages, TorchScript.
In: ExportOptions and a checkpoint. Out: files, each checked against eager, and export.json.
"""
