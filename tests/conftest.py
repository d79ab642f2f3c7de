"""What every test starts from."""

import signal

# A shell that runs pytest in the background makes it ignore Ctrl-C, and its children inherit that; some tests
# send it to theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)
