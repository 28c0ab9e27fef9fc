"""How loadgen, training_probe and the embedded server end. Scripts depend on these numbers: no meaning changes."""

OK = 0
BAD_OPTIONS = 2  # a mistake of the user
FAILED = 3  # the server, a cell or a micro-benchmark failed
INVALID = 4  # measured, but the numbers cannot be trusted
STOPPED = 130  # by the user, before there was anything to report
UNREAD = 141  # nobody read the output; as the shell says of a program that wrote into a closed pipe
