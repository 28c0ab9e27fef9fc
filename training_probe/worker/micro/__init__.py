"""The processes of `training_probe micro`: `python -m training_probe.worker.micro DIR`, collectives under torchrun.

Only what runs here imports torch. What passes in and out are the files of training_probe.points.
"""
