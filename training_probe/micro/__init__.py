"""The processes of `training_probe micro`: each runs `python -m training_probe.micro DIR`, collectives under torchrun.

Only what runs here imports torch. What passes in and out are the files of training_probe.micro_points.
"""
