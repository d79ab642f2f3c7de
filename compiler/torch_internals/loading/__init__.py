"""What a client needs to load and run an artifact, and nothing that compiles.
In: a bundle whose signature holds, with its libraries; out: a callable.
May import dynamo.programs.generated_code, triton.caches, triton.extensions and patching.
"""
