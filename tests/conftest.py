"""What all tests share: programs start as a terminal starts them, also where the tests run under nohup or in the
background of a shell; a property may take as long as the machine does."""

import signal

from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# A signal that is ignored stays so in every program that is started; one with a handler has its default there.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
