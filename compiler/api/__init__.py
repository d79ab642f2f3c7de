"""Bodies of the HTTP endpoints other than the request and the artifact, as structs. Torch-free.
JSON goes in and out; nothing is computed here except checks of fields.
Imports artifact, request, tuning and errors.
"""
