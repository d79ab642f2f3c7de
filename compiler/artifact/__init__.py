"""What comes back: manifest and members in one signed file, and whether to believe it. Torch-free.
A manifest and files go in, a container comes out; a container and a Trust go in, checked members come out.
Imports request, decoding and errors.
"""
