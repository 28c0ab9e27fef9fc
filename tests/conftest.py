"""What all tests share: programs start as a terminal starts them, also where the tests run under nohup."""

import signal

if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # A signal that is ignored stays so in every program that is started; one with a handler has its default there.
    signal.signal(signal.SIGHUP, lambda number, frame: None)
