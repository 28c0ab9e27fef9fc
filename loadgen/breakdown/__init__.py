"""Where a decode step's time goes: a server's trace in, seconds by kind of work and part of the model out."""
