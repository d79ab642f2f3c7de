"""Bodies of the HTTP endpoints other than the request and the artifact, as structs. Torch-free.
JSON goes in and out; nothing is computed here beyond checks of the fields.
Imports artifact, request, tuning and errors.
"""
