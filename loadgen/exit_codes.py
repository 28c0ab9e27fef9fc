"""How loadgen, training_probe and the embedded server end. Scripts depend on these numbers: no meaning changes."""

OK = 0
BAD_OPTIONS = 2  # a mistake of the user
FAILED = 3  # the server, a cell or a micro-benchmark failed
INVALID = 4  # measured, but the numbers cannot be trusted
BEYOND_LIMIT = 5  # of `compare --fail-if`: B is worse than A by more than a limit allows
SIGNALLED = 128  # and the signal's number: stopped by the user, 129 SIGHUP, 130 Ctrl-C, 143 SIGTERM
STOPPED = 130  # by Ctrl-C
UNREAD = 141  # nobody read the output; as the shell says of a program that wrote into a closed pipe
