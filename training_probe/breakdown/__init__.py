"""Where a training step's time goes: a trace in, seconds by pass, module and kind of kernel out."""
