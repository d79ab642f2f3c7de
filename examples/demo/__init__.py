"""`torchrelay demo`: the same scripts locally, through a service, and as a second teammate without a compiler."""
