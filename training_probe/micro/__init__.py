"""`training_probe micro`: matrix products, copies and collectives; points, presets, tables and figures."""
