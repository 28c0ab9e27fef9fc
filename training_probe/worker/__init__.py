"""One run of one cell, inside its processes: real engines on random weights of the model's real shape.

`python -m training_probe.worker DIR` under torchrun. Only what runs here imports torch, transformers, deepspeed, peft,
bitsandbytes or megatron.
"""
