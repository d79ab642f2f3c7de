"""Training scripts that change one word, and the demo that runs them three ways."""
