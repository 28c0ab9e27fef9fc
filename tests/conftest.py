"""What all tests share: programs start as a terminal starts them, also where the tests run under nohup or in the
background of a shell."""

import signal

# A signal that is ignored stays so in every program that is started; one with a handler has its default there.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
