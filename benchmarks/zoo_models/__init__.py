"""The zoo: 163 models of PyTorch 2.0's announcement by name, and newer ones. Use `zoo_models.registry`."""
